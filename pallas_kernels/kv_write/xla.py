"""Writing keys and values with plain XLA: token-wise for one token a row, page-wise for more.

XLA on CPU runs a scatter as a loop over its updates, so a chunk of 512 tokens is written as 9 pages, not 512 slots.
"""

import jax.numpy as jnp

from pallas_kernels.arrays import NewKeys, Pages, PageTable, Positions
from pallas_kernels.kv_write import reference


def kv_write(pages: Pages, keys: NewKeys, values: NewKeys, page_table: PageTable, positions: Positions) -> Pages:
    """As the reference, where a row's positions are consecutive and its padding (-1) comes last. DONATES pages."""
    if positions.shape[1] == 1:
        return reference.kv_write(pages, keys, values, page_table, positions)
    return _write_by_page(pages, keys, values, page_table, positions)


def _write_by_page(pages: Pages, keys: NewKeys, values: NewKeys, page_table: PageTable, positions: Positions) -> Pages:
    """Read each page that the chunk touches, put the fresh slots in, write it back whole."""
    page_size, tokens = pages.shape[3], positions.shape[1]
    start = positions[:, 0]
    count = jnp.sum(positions >= 0, axis=1)
    touched = start[:, None] // page_size + jnp.arange((tokens - 2) // page_size + 2)  # [s, pages of the chunk]
    slot_position = touched[:, :, None] * page_size + jnp.arange(page_size)
    token = slot_position - start[:, None, None]  # [s, pages of the chunk, b]
    fresh = (token >= 0) & (token < count[:, None, None])
    owners = jnp.take_along_axis(page_table, jnp.clip(touched, 0, page_table.shape[1] - 1), axis=1)
    owners = jnp.where(fresh.any(axis=-1), owners, pages.shape[0])  # past the end: dropped
    rows = jnp.arange(positions.shape[0])[:, None, None]
    both = jnp.stack([keys, values], axis=2).astype(pages.dtype)  # [s, t, 2, k, c]
    incoming = jnp.moveaxis(both[rows, jnp.clip(token, 0, tokens - 1)], 2, 4)  # [s, pages, 2, k, b, c]
    old = pages.at[owners].get(mode="clip")
    return pages.at[owners].set(jnp.where(fresh[:, :, None, None, :, None], incoming, old), mode="drop")
