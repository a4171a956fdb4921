"""Paged prefill attention on TPU: flash attention (arXiv 2205.14135) over pages that are fetched as they are met.

Knows how a call becomes a kernel: the grid, the layout of queries, the rooms. `tpu_kernel` is what a program does.

A program takes a block of one row's queries, for a few key heads and their query heads, and walks over the pages that
these queries see. A row's work depends on its own lengths alone: pages past the diagonal or before the window, and
blocks of padding, cost nothing.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels import tpu_chip, tpu_pages
from pallas_kernels.arrays import Lengths, Pages, PageTable, Positions, Queries, Sinks
from pallas_kernels.paged_prefill_attention.tpu_blocks import LANES, Blocks, choose_blocks
from pallas_kernels.paged_prefill_attention.tpu_kernel import Scores, State, attend


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
    """As the reference, where a row's positions are consecutive, end at its length, and its padding (-1) comes last.

    bfloat16 queries are multiplied with bfloat16 and int8 pages in bfloat16, all else in float32; sums are float32.
    Raises NotImplementedError for pages whose tokens neither divide 128 nor are a multiple of it, for pages or a table
    too large for a core, for a scale that is not positive, and for float16. interpret goes to Pallas.
    """
    tpu_chip.require_dtypes(queries=queries, pages=jax.tree.leaves(pages)[0])
    if scale <= 0:
        raise NotImplementedError(f"a scale of {scale}: the largest product must have the largest score")
    blocks = choose_blocks(queries, pages)
    start = jnp.maximum(positions[:, 0], 0)
    count = jnp.minimum(jnp.sum(positions >= 0, axis=1, dtype=jnp.int32), lengths)
    scores = Scores(scale, softcap, window)
    mixed = [
        _attend(blocks, scores, queries[some], pages, (page_table[some], start[some], count[some]), sinks, interpret)
        for some in tpu_pages.rows_at_once(page_table)
    ]
    return mixed[0] if len(mixed) == 1 else jnp.concatenate(mixed)


def _attend(
    blocks: Blocks,
    scores: Scores,
    queries: Queries,
    pages: Pages,
    rows: tuple[PageTable, Int32[Array, " s"], Int32[Array, " s"]],
    sinks: Sinks | None,
    interpret: Any,
) -> Queries:
    """One call of the kernel, on all of the rows it is given: their tables, first positions and counts of queries."""
    table, *ends = rows
    s, tokens, k, g, c = queries.shape
    scalars = [table.reshape(-1), *ends, *([] if sinks is None else [sinks.astype(jnp.float32)])]
    laid = _lay_out(queries, blocks)
    call = _prepare(blocks, scores, pages, laid, len(scalars), interpret)
    mixed = call(*scalars, laid, jax.tree.leaves(pages))
    return mixed.reshape(s, laid.shape[1], k, g, -1)[:, :tokens, :, :, :c]


def _lay_out(queries: Queries, blocks: Blocks) -> Float[Array, "s padded_t kg*lanes"]:
    """Heads side by side, each from a multiple of 128 lanes on; tokens in whole blocks."""
    rows, tokens, _, _, c = queries.shape
    padded = jnp.pad(queries, ((0, 0), (0, -tokens % blocks.tokens), (0, 0), (0, 0), (0, -c % LANES)))
    return padded.reshape(rows, padded.shape[1], -1)


def _prepare(
    blocks: Blocks,
    scores: Scores,
    pages: Pages,
    queries: Float[Array, "s padded_t kg*lanes"],
    scalars: int,
    interpret: Any,
) -> Any:
    """The kernel over a grid of programs: units of heads, which share nothing, then rows, then their blocks."""
    rows, tokens, width = queries.shape
    c = jax.tree.leaves(pages)[0].shape[-1]
    lanes = blocks.heads * blocks.group * -(-c // LANES) * LANES

    def asked(unit: Array, row: Array, block: Array, *scalars: Any) -> tuple[Array, ...]:
        last = jax.lax.div(jnp.maximum(scalars[2][row] - 1, 0), jnp.int32(blocks.tokens))
        return row, jnp.minimum(block, last), unit  # blocks of padding fetch no queries

    block = (None, blocks.tokens, lanes)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=scalars,
        grid=(width // lanes, rows, tokens // blocks.tokens),
        in_specs=[pl.BlockSpec(block, asked), tpu_pages.in_hbm(pages)],
        out_specs=pl.BlockSpec(block, lambda unit, row, block, *_: (row, block, unit)),
        scratch_shapes=[
            tpu_pages.make_rooms(pages, blocks.pages, blocks.heads),
            pltpu.SMEM((1,), jnp.int32),
            State(*(pltpu.VMEM((blocks.heads, blocks.rows, lanes), jnp.float32) for lanes in (LANES, LANES, c))),
        ],
    )
    return pl.pallas_call(
        partial(attend, blocks=blocks, scores=scores),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        grid_spec=grid,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="paged_prefill_attention",
    )
