"""What paged decode attention means: prefill attention of one query, the row's last."""

import jax.numpy as jnp

from pallas_kernels.arrays import DecodeQueries, Lengths, Pages, PageTable, Sinks
from pallas_kernels.paged_prefill_attention.reference import paged_prefill_attention


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
) -> DecodeQueries:
    """Attention of each row's query, at position length - 1, in float32, returned in the queries' dtype.

    It sees keys max(0, length - window) .. length - 1; no other slot is met, so the others may hold NaN, and table
    entries past the length anything. A row of length 0 gets zeros. The rest is as in `paged_prefill_attention`.
    """
    positions = jnp.maximum(lengths, 0)[:, None] - 1
    mixed = paged_prefill_attention(
        queries[:, None],
        pages,
        page_table,
        positions,
        lengths,
        window=window,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
    )
    return mixed[:, 0]
