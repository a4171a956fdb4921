"""Paged attention in plain XLA: one query a row walks over its pages, a chunk of queries meets itself first."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.arrays import Lengths, Pages, PageTable, Positions, Queries, Sinks
from pallas_kernels.paged_attention.xla_decode import Rows, decode_attention
from pallas_kernels.paged_attention.xla_prefill import prefill_attention


@partial(jax.jit, static_argnames=("window", "scale", "softcap"))
def paged_attention(
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
) -> Queries:
    """As the reference, where a row's positions are consecutive, end at its length, and its padding (-1) comes last.

    Jitted, so that a model of many layers traces it once.
    """
    scaled = queries.astype(jnp.float32) * scale
    if positions.shape[1] == 1:
        rows = Rows(scaled[:, 0], page_table, positions[:, 0], lengths)
        mixed = decode_attention(rows, pages, window=window, softcap=softcap, sinks=sinks)[:, None]
    else:
        mixed = prefill_attention(
            scaled, pages, page_table, positions, lengths, window=window, softcap=softcap, sinks=sinks
        )
    return mixed.astype(queries.dtype)
