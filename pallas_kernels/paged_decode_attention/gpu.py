"""Paged decode attention for Hopper (Mosaic GPU): a program for each row, key head and split of the row's keys.

The query heads of a group are the first rows of a tile; what fills the tile below them is computed and thrown away,
which costs nothing while memory is what one waits for. Where rows are few, each is split, so that every SM has work,
and XLA merges the splits' softmaxes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from pallas_kernels.arrays import DecodeQueries, Lengths, Pages, PageTable, Sinks
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
from pallas_kernels.gpu_chip import PROGRAMS

SHARE = 4
"""Blocks that are the least worth a split of their own: its ring starts empty."""


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
    """As the reference, with weights, and the mean of each split, rounded to bfloat16.

    interpret: handed to Pallas. Raises NotImplementedError for what the kernel cannot do. Jitted, so that a model of
    many layers traces it once.
    """
    k, b, c, pool = open_pool(queries, pages)
    s, _, g, _ = queries.shape
    if g > ROWS:
        raise NotImplementedError(f"{g} query heads to a key head; a tile holds {ROWS}")
    span = page_table.shape[1] * b
    splits = count_splits(s * k, span if window is None else min(window, span))
    group = g + -g % 8  # whole lines of eight, as they lie in shared memory
    call = Call(k, group, b, c, len(pool) == 2, window, scale, softcap, interpret)
    parts = (s, k, splits, group)
    run = plgpu.kernel(
        partial(_kernel, call),
        out_type=[jax.ShapeDtypeStruct((*parts, c), queries.dtype), *[jax.ShapeDtypeStruct(parts, jnp.float32)] * 2],
        scratch_types=[*call.scratch(), *[plgpu.SMEM((ROWS,), jnp.float32)] * 2],
        grid=(s, k, splits),
        grid_names=("row", "head", "split"),
        kernel_name="paged_decode_attention",
        compiler_params=COMPILER,
        interpret=interpret,
    )
    padded = jnp.pad(queries, ((0, 0), (0, 0), (0, group - g), (0, 0))).reshape(-1, c)
    mixed, peak, total = run(padded, page_table, jnp.maximum(lengths, 0), *pool)
    return _merge(mixed[:, :, :, :g], peak[:, :, :, :g], total[:, :, :, :g], sinks).astype(queries.dtype)


def count_splits(programs: int, keys: int) -> int:
    """Into how many a row is split that sees up to `keys` keys, where whole rows would be `programs` programs."""
    return max(1, min(-(-PROGRAMS // programs), keys // KEYS // SHARE))


def _kernel(call: Call, *refs: Any) -> None:
    """One split of one row and key head. refs: operands, the pool last, three results, then shared memory."""
    queries, page_table, lengths, lines, *rest = refs
    scales = rest.pop(0) if call.int8 else None
    mixed, peaks, totals, *shared, peak, total = rest
    row, head, split = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("split")
    rooms = Rooms(*shared)
    span = _span(call, lengths[row], split, mixed.shape[2])
    top = pl.ds(0, call.group)

    @pl.when(span.first < span.last)
    def _() -> None:
        line = pl.multiple_of((row * call.heads + head) * call.group, 8)
        plgpu.copy_gmem_to_smem(queries.at[pl.ds(line, call.group)], rooms.queries.at[top], rooms.queries_here)
        plgpu.barrier_wait(rooms.queries_here)

    def seen(key: Int32[Array, "rows keys"]) -> Bool[Array, "rows keys"]:
        return (key >= span.begin) & (key < span.end)

    state = attend(call, rooms, Source(lines, scales, page_table, row, head), span, nothing(call), seen)
    store(call, rooms.queries, state)
    peak[...] = state.peak
    total[...] = state.total
    plgpu.commit_smem()
    for room, result in ((rooms.queries, mixed), (peak, peaks), (total, totals)):
        plgpu.copy_smem_to_gmem(room.at[top], result.at[row, head, split])
    plgpu.wait_smem_to_gmem(0)


def _span(call: Call, length: Scalar, split: Scalar, splits: int) -> Span:
    """The keys that a row's query sees, and the split's even share of their blocks."""
    begin = jnp.int32(0) if call.window is None else jnp.maximum(length - call.window, 0)
    first, last = lax.div(begin, KEYS), lax.div(length + KEYS - 1, KEYS)
    share = lax.div(last - first + splits - 1, splits)
    first = first + split * share
    return Span(begin, length, first, jnp.minimum(first + share, last))


def _merge(
    mixed: BFloat16[Array, "s k splits g c"],
    peak: Float32[Array, "s k splits g"],
    total: Float32[Array, "s k splits g"],
    sinks: Sinks | None,
) -> Float32[Array, "s k g c"]:
    """The mean over the keys of all splits, and the sinks, from the mean over each split's."""
    highest = peak.max(axis=2, keepdims=True)
    highest = highest if sinks is None else jnp.maximum(highest, sinks[:, None])
    shares = total * jnp.exp(peak - highest)
    whole = shares.sum(axis=2, keepdims=True)
    whole = whole if sinks is None else whole + jnp.exp(sinks[:, None] - highest)
    shares = shares / jnp.where(whole == 0.0, 1.0, whole)
    return (mixed * shares[..., None]).sum(axis=2)
