"""What paged prefill attention means: gather every page of a row, mask, softmax. Slow, and meant to be read."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from pallas_kernels.arrays import Lengths, Pages, PageTable, Positions, Queries, Sinks
from pallas_kernels.pages import as_float32, page_shape

HIGHEST = jax.lax.Precision.HIGHEST
"""Left alone, a TPU would multiply float32 as bfloat16 and a GPU as TF32."""


def visible(positions: Positions, lengths: Lengths, keys: int, window: int | None) -> Bool[Array, "s t keys"]:
    """Which of a row's first `keys` positions each query sees.

    Position 5 with window 3 and length 8:      keys 0 1 2 3 4 5 6 7
                                                     0 0 0 1 1 1 0 0
    """
    key = jnp.arange(keys)
    query = positions[:, :, None]
    seen = (key <= query) & (key < lengths[:, None, None])
    return seen if window is None else seen & (key > query - window)


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
) -> Queries:
    """Attention of each query over its row's pages, in float32, returned in the queries' dtype.

    In a pool of one plane the keys are the values, all of their features.

    The query at position i sees keys max(0, i - window + 1) .. i of those below the row's length. Slots that no query
    may see are never read: they may hold NaN, and table entries past the length may hold anything. A query that sees
    nothing (position -1, or a row of length 0) gets zeros. sinks (gpt-oss; arXiv 2309.17453): a logit per query head in
    the softmax beside the keys' own, whose value is 0.
    """
    page_size = page_shape(pages)[3]
    span = page_table.shape[1] * page_size
    seen = visible(positions, lengths, span, window)
    row_reads = seen.any(axis=1)  # [s, keys]
    owned = row_reads.reshape(*page_table.shape, page_size).any(axis=-1)
    gathered = as_float32(jax.tree.map(lambda pool: pool[jnp.where(owned, page_table, 0)], pages))
    by_head = jnp.moveaxis(gathered, (2, 3), (0, 2))  # [planes, s, k, p, b, c]
    by_head = by_head.reshape(*by_head.shape[:3], span, -1)
    by_head = jnp.where(row_reads[:, None, :, None], by_head, 0.0)
    keys, values = by_head[0], by_head[-1]  # the same in a pool of one plane
    scores = scale * jnp.einsum("stkgc,skxc->skgtx", queries.astype(jnp.float32), keys, precision=HIGHEST)
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    mask = seen[:, None, None]
    scores = jnp.where(mask, scores, -jnp.inf)
    sink = jnp.full(queries.shape[2:4], -jnp.inf) if sinks is None else sinks
    sink = sink[None, :, :, None, None]  # as one more score of every query
    peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min), sink)
    weights = jnp.where(mask, jnp.exp(scores - peak), 0.0)
    total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - peak)
    shares = weights / jnp.where(total == 0, 1.0, total)
    mixed = jnp.einsum("skgtx,skxc->stkgc", shares, values, precision=HIGHEST)
    return mixed.astype(queries.dtype)
