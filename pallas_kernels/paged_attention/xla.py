"""Paged attention in plain XLA."""

import jax
import jax.numpy as jnp

from pallas_kernels.arrays import Lengths, Pages, PageTable, Positions, Queries


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
) -> Queries:
    """As the reference: a loop over pages with an online softmax."""
    page_size = pages.shape[3]
    s, t, k, g, c = queries.shape
    q = jnp.moveaxis(queries.astype(jnp.float32) * scale, 1, 3)  # [s, k, g, t, c]
    position = positions[:, None, None, :, None]
    length = lengths[:, None, None, None, None]
    low = jnp.finfo(jnp.float32).min

    def body(j, carry):
        peak, total, mixed = carry
        owner = jnp.where(j * page_size < lengths, page_table[:, j], page_table[:, 0])
        key = j * page_size + jnp.arange(page_size)
        stale = (key[None, :] >= lengths[:, None])[:, None, :, None]
        keys = jnp.where(stale, 0.0, pages[owner, 0].astype(jnp.float32))
        values = jnp.where(stale, 0.0, pages[owner, 1].astype(jnp.float32))
        scores = jnp.einsum("skgtc,skbc->skgtb", q, keys)
        scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
        seen = (key <= position) & (key < length)
        seen = seen if window is None else seen & (key > position - window)
        scores = jnp.where(seen, scores, low)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
        fade = jnp.exp(peak - new_peak)
        total = total * fade + weights.sum(axis=-1)
        mixed = mixed * fade[..., None] + jnp.einsum("skgtb,skbc->skgtc", weights, values)
        return new_peak, total, mixed

    start = (jnp.full((s, k, g, t), low), jnp.zeros((s, k, g, t)), jnp.zeros((s, k, g, t, c)))
    _, total, mixed = jax.lax.fori_loop(0, (lengths.max() + page_size - 1) // page_size, body, start)
    mixed = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return jnp.moveaxis(mixed, 3, 1).astype(queries.dtype)
