"""Paged decode attention on TPU: each row's pages by asynchronous copies, nothing read that the row does not see.

A grid step is a row. It walks over its pages, a block of several at a time, while the next block is on its way; the
last block of a row starts the first copies of the next row, so that the memory never rests between rows. The rows are
dealt out by length to two halves of the grid, which the two cores of a v4 or v5p share between them.

Keys and values are the stationary operands of the matrix unit, and the few queries pass through it. Groups of less
than 8 queries would leave most of a register empty, so that several heads share one: a tile. Each head's product is
made for the whole tile, and a row takes that of its own head.

docs/notes/012-tpu-decode-kernel.md has the counts by which it was tuned.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import tpu_chip, tpu_pages
from pallas_kernels.arrays import DecodeQueries, Lengths, Pages, PageTable, Sinks
from pallas_kernels.pages import page_shape
from pallas_kernels.tpu_pages import Number, Ref, Rooms

LANES, SUBLANES = 128, 8
"""Of a vector register of 32-bit numbers."""
LOWEST = float(jnp.finfo(jnp.float32).min)
LOG2_E = 1.4426950408889634
"""Scores are kept times this, since the chip computes powers of 2."""
TOKENS = (1024, 512, 256)
"""Of a block: the first of these whose room is within `ROOM_BYTES`, or the last. Few heads need many tokens: what one
block waits for in a row, product, peak, powers, product, takes some 150 cycles that only its own work can fill."""
ROOM_BYTES = 5 << 18
MOST_ROOM_BYTES = 4 << 20
"""Both rooms and what the compiler keeps must fit the 16 MiB of a v4, and what other chips give a kernel unasked."""


@dataclass(frozen=True)
class Plan:
    """What is known of a call when its kernel is compiled."""

    rows: int
    kv_heads: int
    group: int
    table_width: int
    together: int
    """Pages of a block."""
    window: int | None
    scale: float
    softcap: float | None

    @property
    def halves(self) -> int:
        """First dimension of the grid."""
        return min(2, self.rows)

    @property
    def steps(self) -> int:
        """Second dimension of the grid: rows of a half."""
        return -(-self.rows // self.halves)

    @property
    def tile_heads(self) -> int:
        """Key heads that share a tile."""
        return max(1, min(SUBLANES // self.group, self.kv_heads))

    @property
    def tile_rows(self) -> int:
        """Sublanes of a tile."""
        return -(-self.tile_heads * self.group // SUBLANES) * SUBLANES

    @property
    def tiles(self) -> int:
        """Tiles of a row."""
        return -(-self.kv_heads // self.tile_heads)

    def heads(self, tile: int) -> range:
        """The key heads of a tile."""
        return range(tile * self.tile_heads, min(self.kv_heads, (tile + 1) * self.tile_heads))


@partial(jax.jit, static_argnames=("window", "scale", "softcap", "interpret"))
def paged_decode_attention(
    queries: DecodeQueries,
    pages: Pages,
    page_table: PageTable,
    lengths: Lengths,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Sinks | None = None,
    interpret: Any = False,
) -> DecodeQueries:
    """As the reference, but queries and weights that meet bfloat16 or int8 pages are rounded to bfloat16.

    Raises NotImplementedError for pages that do not tile 128 tokens, for pages or a table too large for a core, and for
    float16. interpret goes to Pallas.
    """
    (_, width), (_, k, g, _) = page_table.shape, queries.shape
    tpu_chip.require_dtypes(queries=queries, pages=jax.tree.leaves(pages)[0])
    together = _pages_together(pages, width, window)
    mixed = []
    for some in tpu_pages.rows_at_once(page_table):
        plan = Plan(some.stop - some.start, k, g, width, together, window, scale, softcap)
        mixed.append(_attend(plan, queries[some], pages, page_table[some], lengths[some], sinks, interpret))
    return mixed[0] if len(mixed) == 1 else jnp.concatenate(mixed)


def _pages_together(pages: Pages, table_width: int, window: int | None) -> int:
    """Pages of a block: as many as `TOKENS` says, as a row may see, and as need no loop to fetch."""
    _, planes, k, size, c = page_shape(pages)
    if size % SUBLANES or (LANES % size and size % LANES):
        raise NotImplementedError(f"pages of {size} tokens: only multiples of 8 that divide 128 or that 128 divides")
    token = planes * k * (-(-c // LANES) * LANES) * jax.tree.leaves(pages)[0].dtype.itemsize
    tokens = next((tokens for tokens in TOKENS if tokens * token <= ROOM_BYTES), TOKENS[-1])
    least = max(LANES, size)
    if least * token > MOST_ROOM_BYTES:
        raise NotImplementedError(f"blocks of {least} tokens of {token} bytes: at most {MOST_ROOM_BYTES} fit in VMEM")
    visible = table_width if window is None else min(table_width, (window - 2) // size + 2)
    tokens = min(tokens, visible * size, tpu_pages.UNROLLED * size, MOST_ROOM_BYTES // token)
    return max(tokens // LANES * LANES, least) // size


def _attend(
    plan: Plan,
    queries: DecodeQueries,
    pages: Pages,
    page_table: PageTable,
    lengths: Lengths,
    sinks: Sinks | None,
    interpret: Any,
) -> DecodeQueries:
    """One call of the kernel, on all of the rows it is given."""
    rows, k, g, c = queries.shape
    leaves = jax.tree.leaves(pages)
    arranged = _arrange(plan, queries.astype(jnp.float32 if leaves[0].dtype == jnp.float32 else jnp.bfloat16))
    if sinks is not None:
        sinks = _arrange(plan, jnp.broadcast_to(LOG2_E * sinks[None, :, :, None], (1, k, g, LANES)))[0]
    order, ends = _deal(plan, lengths)
    block = pl.BlockSpec(
        (1, *arranged.shape[1:]), lambda half, step, order, *_: (order[half * plan.steps + step], 0, 0, 0)
    )
    whole = None if sinks is None else pl.BlockSpec(sinks.shape, lambda *_: (0, 0, 0))
    mixed = pl.pallas_call(
        partial(_kernel, plan),
        out_shape=jax.ShapeDtypeStruct(arranged.shape, queries.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(plan.halves, plan.steps),
            in_specs=[block, whole, tpu_pages.in_hbm(pages)],
            out_specs=block,
            scratch_shapes=[tpu_pages.make_rooms(pages, plan.together), pltpu.SMEM((1,), jnp.int32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True),
        interpret=interpret,
        name="paged_decode_attention",
    )(order, ends, page_table.reshape(-1), arranged, sinks, leaves)
    return mixed[:, :, : plan.tile_heads * g].reshape(rows, -1, g, c)[:, :k]


def _arrange(plan: Plan, queries: Float[Array, "s k g c"]) -> Float[Array, "s tiles tile_rows c"]:
    """Queries in tiles, the rest of a tile zeros."""
    s, k, g, c = queries.shape
    queries = jnp.pad(queries, ((0, 0), (0, plan.tiles * plan.tile_heads - k), (0, 0), (0, 0)))
    queries = queries.reshape(s, plan.tiles, plan.tile_heads * g, c)
    return jnp.pad(queries, ((0, 0), (0, 0), (0, plan.tile_rows - plan.tile_heads * g), (0, 0)))


def _deal(plan: Plan, lengths: Lengths) -> tuple[Int32[Array, " places"], Int32[Array, " places"]]:
    """Row and length of each step of each half: rows from long to short, halves of like work, empty rows last.

    An odd number of rows leaves the last place over: it repeats the row before it, with length 0. Ranks are counted,
    not sorted: on TPU a sum over all pairs of rows is cheaper than a sort.
    """
    rows, halves = plan.rows, plan.halves
    row, places = jnp.arange(rows, dtype=jnp.int32), jnp.arange(halves * plan.steps)
    longer = (lengths > lengths[:, None]) | ((lengths == lengths[:, None]) & (row < row[:, None]))
    rank = longer.sum(axis=1)
    turned = (rank + rows % 2 * (rows % 4 - 1)) % 4  # so that half 0 has the odd row
    half = jnp.where((turned == 0) | (turned == 3), 0, halves - 1)
    place = half * plan.steps + rank // halves
    here = place == jnp.minimum(places, rows - 1)[:, None]
    order, ends = (jnp.where(here, x, 0).sum(axis=1, dtype=jnp.int32) for x in (row, lengths))
    return order, jnp.where(places < rows, ends, 0)


class Walk(NamedTuple):
    """The pages that a row sees. Tokens count from the first slot of the first of them."""

    entry: Number
    """Where the first one stands in the page table."""
    begin: Number
    """First token seen."""
    end: Number
    """One past the last."""
    pages: Number


def _walk(plan: Plan, order: Ref, ends: Ref, place: Number, size: int) -> Walk:
    """The walk of the row at a place of the grid."""
    length = ends[place]
    begin = jnp.int32(0) if plan.window is None else jnp.maximum(length - plan.window, 0)
    first = jax.lax.div(begin, size)
    end = length - first * size
    return Walk(order[place] * plan.table_width + first, begin - first * size, end, jax.lax.div(end + size - 1, size))


def _kernel(
    plan: Plan,
    order: Ref,
    ends: Ref,
    table: Ref,
    queries: Ref,
    sinks: Ref | None,
    pool: list[Ref],
    out: Ref,
    rooms: Rooms,
    turns: Ref,
) -> None:
    """A step of the grid. turns counts the blocks that this half has met: it tells which room is whose."""
    step = pl.program_id(1)
    place = pl.program_id(0) * plan.steps + step
    row = _walk(plan, order, ends, place, rooms.page_size)

    @pl.when(step == 0)
    def _() -> None:
        turns[0] = 0
        tpu_pages.start(pool, rooms, jnp.int32(0), lambda i: table[row.entry + i], row.pages)

    @pl.when((row.pages == 0) & (place < plan.rows))
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when(row.pages > 0)
    def _() -> None:
        after = _walk(plan, order, ends, jnp.where(step + 1 < plan.steps, place + 1, place), rooms.page_size)
        after = after._replace(pages=jnp.where(step + 1 < plan.steps, after.pages, 0))
        blocks = jax.lax.div(row.pages + plan.together - 1, plan.together)
        done = turns[0]
        turns[0] = done + blocks

        def block(index: Number, states: list[State]) -> list[State]:
            room, first = jax.lax.rem(done + index, 2), index * plan.together
            last = index + 1 == blocks
            entry = jnp.where(last, after.entry, row.entry + first + plan.together)
            count = jnp.where(last, after.pages, row.pages - first - plan.together)
            tpu_pages.start(pool, rooms, 1 - room, lambda i: table[entry + i], count)
            tpu_pages.wait(pool, rooms, room, row.pages - first)
            tpu_pages.silence_places(rooms, room, row.pages - first)
            begin, end = (edge - first * rooms.page_size for edge in (row.begin, row.end))
            tpu_pages.silence_values(rooms, room, begin, end)
            return _meet(Block(plan, rooms, room, begin, end), queries, states)

        states = jax.lax.fori_loop(0, blocks, block, _beginning(plan, sinks, out.shape[-1]))
        for tile, state in enumerate(states):
            out[0, tile] = (state.mixed / state.total.sum(axis=1, keepdims=True)).astype(out.dtype)


class State(NamedTuple):
    """A tile's softmax so far (arXiv 2205.14135): highest score, in all lanes; weights, summed lane by lane; values."""

    peak: Float32[Array, "tile_rows 128"]
    total: Float32[Array, "tile_rows 128"]
    mixed: Float32[Array, "tile_rows c"]


def _beginning(plan: Plan, sinks: Ref | None, c: int) -> list[State]:
    """Nothing met, or only the sinks, each of which weighs 1 at its own peak."""
    shape = (plan.tile_rows, LANES)
    mixed = jnp.zeros((plan.tile_rows, c), jnp.float32)
    if sinks is None:
        return [State(jnp.full(shape, LOWEST), jnp.zeros(shape), mixed)] * plan.tiles
    one = jnp.where(jax.lax.broadcasted_iota(jnp.int32, shape, 1) == 0, 1.0, 0.0)
    return [State(sinks[tile], one, mixed) for tile in range(plan.tiles)]


class Block(NamedTuple):
    """A room whose pages have arrived, and which of its tokens the row sees: begin .. end - 1."""

    plan: Plan
    rooms: Rooms
    room: Number
    begin: Number
    end: Number

    def seen(self) -> Bool[Array, "tile_rows tokens"]:
        """The same for every row of every tile."""
        token = jax.lax.broadcasted_iota(jnp.int32, (self.plan.tile_rows, self.rooms.tokens), 1)
        seen = token < self.end
        return seen if self.plan.window is None else seen & (token >= self.begin)

    def product(self, tile: int, plane: int, rows: Array, over: int) -> Float32[Array, "tile_rows _"]:
        """A tile's rows, each times its own head's keys (over=1, features) or values (over=0, tokens)."""
        products = []
        for head in self.plan.heads(tile):
            stationary = self.rooms.matrix(self.room, plane, head).astype(rows.dtype)
            exact = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
            dims = (((1,), (over,)), ((), ()))
            products.append(
                jax.lax.dot_general(rows, stationary, dims, precision=exact, preferred_element_type=jnp.float32)
            )
        return self.own_head(products)

    def scales(self, tile: int, plane: int) -> Float32[Array, "tile_rows tokens"]:
        """What the numbers of a tile's heads are to be multiplied by."""
        scales = [self.rooms.scales_of(self.room, plane, head) for head in self.plan.heads(tile)]
        return self.own_head([jnp.broadcast_to(x, (self.plan.tile_rows, self.rooms.tokens)) for x in scales])

    def own_head(self, by_head: list[Array]) -> Float32[Array, "tile_rows _"]:
        """Each row of the tile from the array of its head."""
        row = jax.lax.broadcasted_iota(jnp.int32, (self.plan.tile_rows, 1), 0)
        own = by_head[-1]
        for i in reversed(range(len(by_head) - 1)):
            own = jnp.where(row < (i + 1) * self.plan.group, by_head[i], own)
        return own


def _meet(block: Block, queries: Ref, states: list[State]) -> list[State]:
    """The softmax of each tile over what was met before and the block.

    Each stage is written for all tiles before the next one, so that the compiler can fill one's waits with another's.
    """
    tiles, values = range(block.plan.tiles), block.rooms.planes - 1
    seen = block.seen()
    scores = [_scores(block, tile, queries[0, tile], seen) for tile in tiles]
    peaks = [jnp.maximum(states[tile].peak, scores[tile].max(axis=1, keepdims=True)) for tile in tiles]
    weights = [jnp.exp2(scores[tile] - _across(peaks[tile], block.rooms.tokens)) for tile in tiles]
    fades = [jnp.exp2(states[tile].peak - peaks[tile]) for tile in tiles]
    met = []
    for tile, state in enumerate(states):
        lanes = [weights[tile][:, i : i + LANES] for i in range(0, block.rooms.tokens, LANES)]
        weighed = weights[tile]
        if block.rooms.scales is not None:
            weighed = jnp.where(seen, weighed * block.scales(tile, values), 0.0)  # unseen scales may be NaN
        added = block.product(tile, values, weighed.astype(queries.dtype), over=0)
        total = state.total * fades[tile] + sum(lanes)
        met.append(State(peaks[tile], total, state.mixed * _across(fades[tile], added.shape[1]) + added))
    return met


def _scores(block: Block, tile: int, queries: Array, seen: Array) -> Float32[Array, "tile_rows tokens"]:
    """Times LOG2_E; LOWEST where a row does not see."""
    plan = block.plan
    scores = block.product(tile, 0, queries, over=1)
    if block.rooms.scales is not None:
        scores *= block.scales(tile, 0)
    if plan.softcap is None:
        scores *= plan.scale * LOG2_E
    else:
        scores = plan.softcap * LOG2_E * jnp.tanh(scores * (plan.scale / plan.softcap))
    return jnp.where(seen, scores, LOWEST)


def _across(x: Float32[Array, "tile_rows 128"], width: int) -> Float32[Array, "tile_rows width"]:
    """What all lanes of a row hold alike, over another width."""
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]
