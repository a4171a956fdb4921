"""Paged prefill attention for Hopper (Mosaic GPU): a program for each tile of 64 query rows of a row and key head.

Query heads that share a key head lie side by side, token after token, so that a tile is full whatever their number. A
tile walks over the pages from the first key that its window reaches to its own last position; what lies past the
diagonal is neither read nor computed.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from pallas_kernels.arrays import Lengths, Pages, PageTable, Positions, Queries, Sinks
from pallas_kernels.gpu_attention import (
    COMPILER,
    KEYS,
    ROWS,
    Call,
    Rooms,
    Scalar,
    Source,
    Span,
    attend,
    nothing,
    open_pool,
    store,
)


@partial(jax.jit, static_argnames=("window", "scale", "softcap", "interpret"))
def paged_prefill_attention(
    queries: Queries,
    pages: Pages,
    page_table: PageTable,
    positions: Positions,
    lengths: Lengths,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Sinks | None = None,
    interpret: Any = False,
) -> Queries:
    """As the reference with weights rounded to bfloat16, where a row's positions are consecutive, end at its length,
    and its padding (-1) comes last.

    interpret: handed to Pallas. Raises NotImplementedError for what the kernel cannot do. Jitted, so that a model of
    many layers traces it once.
    """
    k, b, c, pool = open_pool(queries, pages)
    s, t, _, g, _ = queries.shape
    tiles = -(-t * g // ROWS)
    call = Call(k, g, b, c, len(pool) == 2, window, scale, softcap, interpret)
    run = plgpu.kernel(
        partial(_kernel, call),
        out_type=jax.ShapeDtypeStruct((s, k, tiles, ROWS, c), queries.dtype),
        scratch_types=[*call.scratch(), plgpu.SMEM((ROWS,), jnp.float32)],
        grid=(tiles, s, k),
        grid_names=("tile", "row", "head"),
        kernel_name="paged_prefill_attention",
        compiler_params=COMPILER,
        interpret=interpret,
    )
    start = jnp.maximum(positions[:, 0], 0)
    count = jnp.minimum(jnp.sum(positions >= 0, axis=1, dtype=jnp.int32), lengths)
    mixed = run(_tiled(queries, tiles), page_table, start, count, *pool, *_tiled_sinks(sinks, t, tiles))
    mixed = mixed.reshape(s, k, tiles * ROWS, c)[:, :, : t * g].reshape(s, k, t, g, c)
    return jnp.moveaxis(mixed, 2, 1)


def _tiled(queries: BFloat16[Array, "s t k g c"], tiles: int) -> BFloat16[Array, "lines c"]:
    """Tile after tile of each row and key head."""
    s, t, k, g, c = queries.shape
    flat = jnp.moveaxis(queries, 1, 2).reshape(s, k, t * g, c)
    return jnp.pad(flat, ((0, 0), (0, 0), (0, tiles * ROWS - t * g), (0, 0))).reshape(-1, c)


def _tiled_sinks(sinks: Sinks | None, tokens: int, tiles: int) -> list[Float32[Array, "k tiles*rows"]]:
    """The sink of each query row of a tile; none where there are no sinks."""
    if sinks is None:
        return []
    flat = jnp.tile(sinks, (1, tokens))
    return [jnp.pad(flat, ((0, 0), (0, tiles * ROWS - flat.shape[1])))]


def _kernel(call: Call, queries: Any, page_table: Any, start: Any, count: Any, lines: Any, *refs: Any) -> None:
    """One tile. refs: scales of int8 pages, sinks if there are any, the result, then shared memory."""
    *rest, sink = refs
    scales = rest.pop(0) if call.int8 else None
    shared = len(call.scratch())
    *sinks, mixed = rest[:-shared]
    rooms = Rooms(*rest[-shared:])
    tile = mixed.shape[2] - 1 - lax.axis_index("tile")  # the longest first
    row, head = lax.axis_index("row"), lax.axis_index("head")
    span = _span(call, tile, start[row], count[row])
    line = ((row * call.heads + head) * mixed.shape[2] + tile) * ROWS
    plgpu.copy_gmem_to_smem(queries.at[pl.ds(pl.multiple_of(line, ROWS), ROWS)], rooms.queries, rooms.queries_here)
    plgpu.barrier_wait(rooms.queries_here)
    state = nothing(call)
    if sinks:
        plgpu.copy_gmem_to_smem(sinks[0].at[head, pl.ds(tile * ROWS, ROWS)], sink, rooms.queries_here)
        plgpu.barrier_wait(rooms.queries_here)
        state = state._replace(peak=sink[...], total=jnp.ones((ROWS,), jnp.float32))

    def seen(key: Int32[Array, "rows keys"]) -> Bool[Array, "rows keys"]:
        token = lax.div(tile * ROWS + lax.broadcasted_iota(jnp.int32, key.shape, 0), call.group)
        position = start[row] + token
        unpadded = (key <= position) & (token < count[row])
        return unpadded if call.window is None else unpadded & (key > position - call.window)

    state = attend(call, rooms, Source(lines, scales, page_table, row, head), span, state, seen)
    store(call, rooms.queries, state)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(rooms.queries, mixed.at[row, head, tile])
    plgpu.wait_smem_to_gmem(0)


def _span(call: Call, tile: Scalar, start: Scalar, count: Scalar) -> Span:
    """The keys from the first that a tile's first token sees to its last token's own; none for a tile of padding."""
    first, last = lax.div(tile * ROWS, call.group), lax.div(tile * ROWS + ROWS - 1, call.group)
    begin = jnp.int32(0) if call.window is None else jnp.maximum(start + first - call.window + 1, 0)
    end = jnp.where(first < count, start + jnp.minimum(last + 1, count), 0)
    return Span(begin, end, lax.div(begin, KEYS), lax.div(end + KEYS - 1, KEYS))
