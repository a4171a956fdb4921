"""A tile of 64 query rows over pages, for Hopper (Mosaic GPU): what decode and prefill attention share.

One warpgroup owns a tile. Keys and values come 64 at a time by TMA into a ring in shared memory, both products run on
tensor cores (wgmma: bfloat16 in, float32 out), and the softmax between them is online (arXiv 2205.14135) and float32.
No register layout is named: Mosaic GPU infers them.

Knows nothing of grids: which rows fill a tile and what each of them sees is the caller's to say.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import gpu_chip
from pallas_kernels.arrays import Int8Pages, Pages
from pallas_kernels.pages import page_shape

ROWS = 64
"""Query rows of a tile: what one wgmma takes."""
KEYS = 64
"""Keys of a block. Every page size fills it evenly, or is filled by it; and the ring of a head of 256 still fits."""
PART = 128
"""Features of a head whose sums are updated at once."""
ROOM = 110 * 1024
"""Bytes of shared memory that a tile takes if it can: with two on an SM, one computes while the other waits."""
COMPILER = replace(gpu_chip.COMPILER, approx_math=True)
"""As all kernels', and exp by the hardware's exp2 (off by 2^-22)."""
LOWEST = -1e30
"""No peak is lower. A score that a row may not see is twice as low, so that its weight is 0 whatever the peak."""

Scalar = Int32[Array, ""]


@dataclass(frozen=True)
class Call:
    """What is known of a call while it is traced."""

    heads: int
    group: int
    page_size: int
    head_dim: int
    int8: bool
    window: int | None
    scale: float
    softcap: float | None
    interpret: Any

    @property
    def piece(self) -> int:
        """Keys that one copy brings: a page, or `KEYS` of its keys."""
        return min(self.page_size, KEYS)

    @property
    def swizzle(self) -> int:
        """Bytes of a line of a swizzled tile: the most that a head is a multiple of."""
        return next(width for width in (128, 64, 32) if self.head_dim % (width // 2) == 0)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Begin and width of the parts of a head that are summed one after the other.

        The sum and what is added to it must be in registers together; whole heads of 256 would not fit.
        """
        return [(begin, min(PART, self.head_dim - begin)) for begin in range(0, self.head_dim, PART)]

    @property
    def stages(self) -> int:
        """Blocks of the ring: 2 to 4, as many as `ROOM` holds beside queries, weights and one block in bfloat16."""
        line = self.head_dim + 4 if self.int8 else 2 * self.head_dim
        beside = 2 * (ROWS * self.head_dim + ROWS * KEYS + self.int8 * 2 * KEYS * self.head_dim)
        return max(2, min(4, (ROOM - beside) // (2 * KEYS * line)))

    def scratch(self) -> list[Any]:
        """What `Rooms` is made of."""
        blocks = 1 if self.int8 else self.stages
        arrivals = KEYS // self.piece * (1 + self.int8)
        return [
            self._shared(ROWS, self.head_dim),
            self._shared(blocks, KEYS, self.head_dim),
            self._shared(blocks, KEYS, self.head_dim),
            self._shared(ROWS, KEYS),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.stages),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.stages),
            *([self._numbers(), self._numbers(), *[plgpu.SMEM((self.stages, KEYS), jnp.float32)] * 2] * self.int8),
        ]

    def _numbers(self) -> Any:
        """The ring of int8 keys or values, swizzled where a head is wide enough."""
        width = next((width for width in (128, 64, 32) if self.head_dim % width == 0), None)
        tile = () if width is None else (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width))
        return plgpu.SMEM((self.stages, KEYS, self.head_dim), jnp.int8, transforms=tile)

    def _shared(self, *shape: int) -> Any:
        """Shared memory of bfloat16 in the layout that both TMA and wgmma understand."""
        tile = plgpu.TilingTransform((8, self.swizzle // 2)), plgpu.SwizzleTransform(self.swizzle)
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=tile)


class Rooms(NamedTuple):
    """Shared memory of a tile, and the barriers that tell when it is filled."""

    queries: Any
    """[ROWS, c]; the result goes where they were."""
    keys: Any
    """[stages, KEYS, c]; so the values. Of int8 pages one block, the one at work."""
    values: Any
    weights: Any
    """[ROWS, KEYS]. wgmma would take them from registers, but JAX 0.10 interprets it only from shared memory."""
    queries_here: Any
    keys_here: Any
    values_here: Any
    key_numbers: Any = None
    """[stages, KEYS, c] of int8 pages, and their scales [stages, KEYS]."""
    value_numbers: Any = None
    key_scales: Any = None
    value_scales: Any = None


class Source(NamedTuple):
    """A row's pages of one key head."""

    lines: Any
    """The pool [n * 2 * k * b, c]."""
    scales: Any
    """[n * 2 * k * b] of int8 pages, else None."""
    page_table: Any
    row: Scalar
    head: Scalar


class Span(NamedTuple):
    """Keys that some row of a tile sees, begin <= key < end, and the blocks to walk over, first <= block < last."""

    begin: Scalar
    end: Scalar
    first: Scalar
    last: Scalar


class Softmax(NamedTuple):
    """Of each row so far: the weighted sum of values, the highest score, the sum of weights."""

    mixed: tuple[Float32[Array, "rows width"], ...]
    """Side by side, as `Call.parts` cuts a head."""
    peak: Float32[Array, " rows"]
    total: Float32[Array, " rows"]


Owners = tuple[Scalar, ...]
"""The page of each piece of a block."""


def open_pool(queries: Float[Array, "*any k g c"], pages: Pages) -> tuple[int, int, int, tuple[Array, ...]]:
    """Heads k, page size b, head size c, and the pool as one matrix [lines, c], with scales [lines] if it is int8.

    TMA counts at most five dimensions, and two of them are the swizzled tile's. Raises NotImplementedError, with the
    reason, for queries and pages that the kernels cannot do.
    """
    n, planes, k, b, c = page_shape(pages)
    dtype = jnp.int8 if isinstance(pages, Int8Pages) else pages.dtype
    if dtype not in (jnp.bfloat16, jnp.int8) or queries.dtype != jnp.bfloat16:
        dtypes = f"queries are {queries.dtype} and pages {dtype}"
        raise NotImplementedError(f"{dtypes}; expected bfloat16, to which tensor cores would round them, or int8 pages")
    if planes != 2:
        raise NotImplementedError(f"pages have {planes} plane; expected 2, keys and values")
    if c % 16 or c > 256:
        raise NotImplementedError(f"heads of {c}; expected a multiple of 16 up to 256, as wgmma has it")
    if b % 8 or max(b, KEYS) % min(b, KEYS):
        raise NotImplementedError(f"pages of {b} tokens; expected 8, 16, 32 or a multiple of {KEYS}")
    if n * planes * k * b >= 2**31:
        raise NotImplementedError(f"a pool of {n * planes * k * b} lines; they are counted in int32")
    gpu_chip.require_hopper()
    if isinstance(pages, Int8Pages):
        return k, b, c, (pages.numbers.reshape(-1, c), pages.scales.reshape(-1))
    return k, b, c, (pages.reshape(-1, c),)


def attend(
    call: Call,
    rooms: Rooms,
    source: Source,
    span: Span,
    state: Softmax,
    seen: Callable[[Int32[Array, "rows keys"]], Bool[Array, "rows keys"]],
) -> Softmax:
    """`state`, and what the tile in `rooms.queries` sees of `span`.

    seen: which of the keys at these positions each row sees; it is asked for all keys of a block, the span's or not.
    """
    ahead = call.stages - 1
    owners = _owners(call, source, span, span.first)
    for block in range(ahead):
        pl.when(span.first + block < span.last)(partial(_bring, call, rooms, source, owners, span, span.first + block))
        owners = _owners(call, source, span, span.first + block + 1)

    def turn(block: Scalar, carry: tuple[Owners, Softmax]) -> tuple[Owners, Softmax]:
        owners, state = carry
        pl.when(block + ahead < span.last)(partial(_bring, call, rooms, source, owners, span, block + ahead))
        owners = _owners(call, source, span, block + ahead + 1)  # a turn early: nobody waits for the table
        stage = _stage(call, span, block)
        plgpu.barrier_wait(rooms.keys_here.at[stage])
        scores = _dot_keys(call, rooms.queries, _widen(call, rooms.keys, rooms.key_numbers, stage))
        if call.int8:
            scores *= lax.broadcast_in_dim(rooms.key_scales[stage], scores.shape, [1])
        key = block * KEYS + lax.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1)
        peak, fade, weights = _weigh(jnp.where(seen(key), _capped(call, scores), 2 * LOWEST), state.peak)
        plgpu.barrier_wait(rooms.values_here.at[stage])
        values = _widen(call, rooms.values, rooms.value_numbers, stage)
        rooms.weights[...] = _scaled(call, weights, rooms, stage).astype(jnp.bfloat16)
        if not call.int8:
            _silence(call, rooms.values, stage, block, span)
        plgpu.commit_smem()
        mixed = []
        for (begin, width), sums in zip(call.parts, state.mixed, strict=True):
            fresh = _dot(rooms.weights, values.at[:, pl.ds(begin, width)], (ROWS, width))
            mixed.append(sums * _across(fade, sums.shape) + fresh)
        return owners, Softmax(tuple(mixed), peak, state.total * fade + jnp.sum(weights, axis=1))

    return lax.fori_loop(span.first, span.last, turn, (owners, state))[1]


def nothing(call: Call) -> Softmax:
    """A softmax over no keys."""
    flat = jnp.zeros((ROWS,), jnp.float32)
    return Softmax(tuple(jnp.zeros((ROWS, width), jnp.float32) for _, width in call.parts), flat + LOWEST, flat)


def store(call: Call, room: Any, state: Softmax) -> None:
    """Put the weighted mean of the values into `room` [ROWS, c]; 0 where nothing was met."""
    share = 1.0 / jnp.where(state.total == 0.0, 1.0, state.total)
    for (begin, width), sums in zip(call.parts, state.mixed, strict=True):
        room[:, pl.ds(begin, width)] = (sums * _across(share, sums.shape)).astype(jnp.bfloat16)


def _owners(call: Call, source: Source, span: Span, block: Scalar) -> Owners:
    """Of pieces outside of the span, the nearest page in it: the table says nothing of them."""
    low, high = lax.div(span.begin, call.page_size), lax.div(span.end - 1, call.page_size)
    places = (lax.div(block * KEYS + offset, call.page_size) for offset in range(0, KEYS, call.piece))
    return tuple(source.page_table[source.row, jnp.clip(place, low, high)] for place in places)


def _bring(call: Call, rooms: Rooms, source: Source, owners: Owners, span: Span, block: Scalar) -> None:
    """Start the copies of a block's keys and values into its stage of the ring."""
    stage = _stage(call, span, block)
    inside = lax.rem(block * KEYS, call.page_size)  # 0 but for pages of more than a block
    keys, values = (rooms.key_numbers, rooms.value_numbers) if call.int8 else (rooms.keys, rooms.values)
    planes = ((keys, rooms.key_scales, rooms.keys_here), (values, rooms.value_scales, rooms.values_here))
    for i, page in enumerate(owners):
        for plane, (room, scales, here) in enumerate(planes):
            line = ((page * 2 + plane) * call.heads + source.head) * call.page_size + (inside if i == 0 else 0)
            piece, place = pl.ds(pl.multiple_of(line, 8), call.piece), pl.ds(i * call.piece, call.piece)
            plgpu.copy_gmem_to_smem(source.lines.at[piece], room.at[stage, place], here.at[stage])
            if call.int8:
                plgpu.copy_gmem_to_smem(source.scales.at[piece], scales.at[stage, place], here.at[stage])


def _stage(call: Call, span: Span, block: Scalar) -> Scalar:
    return lax.rem(block - span.first, call.stages)


def _capped(call: Call, products: Float32[Array, "rows keys"]) -> Float32[Array, "rows keys"]:
    """Scores. tanh goes by way of exp: the hardware's own is off by 2^-11, which a cap of 50 makes 0.02 of a logit."""
    if call.softcap is None:
        return products * call.scale
    return call.softcap - 2.0 * call.softcap / (jnp.exp(products * (2.0 * call.scale / call.softcap)) + 1.0)


def _weigh(
    scores: Float32[Array, "rows keys"], peak: Float32[Array, " rows"]
) -> tuple[Float32[Array, " rows"], Float32[Array, " rows"], Float32[Array, "rows keys"]]:
    """The new peak, what sums under the old one are to be multiplied by, and the scores' weights."""
    higher = jnp.maximum(peak, jnp.max(scores, axis=1))
    return higher, jnp.exp(peak - higher), jnp.exp(scores - _across(higher, scores.shape))


def _widen(call: Call, room: Any, numbers: Any, stage: Scalar) -> Any:
    """A block of keys or values in bfloat16, which holds every int8: where it lies."""
    if not call.int8:
        return room.at[stage]
    room[0] = numbers[stage].astype(jnp.bfloat16)
    plgpu.commit_smem()
    return room.at[0]


def _scaled(call: Call, weights: Float32[Array, "rows keys"], rooms: Rooms, stage: Scalar) -> Array:
    """Weights times the values' scales. A slot that nobody sees has the weight 0, and may have the scale NaN."""
    if not call.int8:
        return weights
    scales = lax.broadcast_in_dim(rooms.value_scales[stage], weights.shape, [1])
    return jnp.where(weights == 0.0, 0.0, weights * scales)


def _silence(call: Call, values: Any, stage: Scalar, block: Scalar, span: Span) -> None:
    """Zero the values of a block that lie outside of the span: they may be NaN, and 0 times NaN is NaN."""

    @pl.when((block * KEYS < span.begin) | ((block + 1) * KEYS > span.end))
    def _() -> None:
        for begin, width in call.parts:
            part = values.at[stage, :, pl.ds(begin, width)]
            key = block * KEYS + lax.broadcasted_iota(jnp.int32, (KEYS, width), 0)
            part[...] = jnp.where((key >= span.begin) & (key < span.end), part[...], jnp.bfloat16(0))


def _across(column: Float32[Array, " rows"], shape: tuple[int, ...]) -> Float32[Array, "rows any"]:
    return lax.broadcast_in_dim(column, shape, [0])


def _dot_keys(call: Call, queries: Any, keys: Any) -> Float32[Array, "rows keys"]:
    """queries @ keys.T"""
    if call.interpret and gpu_chip.JAX_0_10:
        return jnp.dot(queries[...], keys[...].T, preferred_element_type=jnp.float32)
    return _dot(queries, keys.transpose((1, 0)), (ROWS, KEYS))


def _dot(a: Any, b: Any, shape: tuple[int, int]) -> Float32[Array, "rows any"]:
    """a @ b, both in shared memory."""

    def multiply(product: Any) -> Array:
        plgpu.wgmma(product, a, b)
        return product[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
