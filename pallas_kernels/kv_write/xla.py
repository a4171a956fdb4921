"""Writing keys and values with plain XLA: token-wise for one token a row, page-wise for more.

XLA on CPU runs a scatter as a loop over its updates and a gather number by number, so a chunk of 512 tokens is laid out
as pages first (a copy) and written as 9 slices: 30 layers in 6 ms, where gather and scatter of whole pages take 20.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped

from pallas_kernels.arrays import NewKeys, Pages, PageTable, Positions
from pallas_kernels.kv_write import reference
from pallas_kernels.pages import as_stored, page_shape


@jax.jit
def kv_write(pages: Pages, keys: NewKeys, values: NewKeys | None, page_table: PageTable, positions: Positions) -> Pages:
    """As the reference, where a row's positions are consecutive and its padding (-1) comes last. DONATES pages.

    Jitted, so that a model of many layers traces it once.
    """
    if positions.shape[1] == 1:
        return reference.kv_write(pages, keys, values, page_table, positions)
    return _write_by_page(pages, as_stored(pages, keys, values), page_table, positions)


def _write_by_page(pages: Pages, new: Any, page_table: PageTable, positions: Positions) -> Pages:
    """Read each page that the chunk touches, put the fresh slots in, write it back whole.

    new: leaves [s, t, planes, k, *c], one for each leaf [n, planes, k, b, *c] of the pool.
    """
    page_size, (rows, tokens) = page_shape(pages)[3], positions.shape
    spread = (tokens - 2) // page_size + 2  # most pages that a chunk touches
    start = jnp.maximum(positions[:, 0], 0)
    count = jnp.sum(positions >= 0, axis=1)
    touched = start[:, None] // page_size + jnp.arange(spread)
    token = touched[:, :, None] * page_size + jnp.arange(page_size) - start[:, None, None]
    fresh = ((token >= 0) & (token < count[:, None, None])).reshape(rows * spread, page_size)
    owners = jnp.take_along_axis(page_table, jnp.clip(touched, 0, page_table.shape[1] - 1), axis=1).reshape(-1)

    def lay_out(leaf: Shaped[Array, "s t planes k *c"]) -> Shaped[Array, "s*spread planes k b *c"]:
        laid = [_lay_out(leaf[row], start[row] % page_size, spread, page_size) for row in range(rows)]
        return jnp.concatenate(laid)

    incoming = jax.tree.map(lay_out, new)

    def put(index: Array, pages: Pages) -> Pages:
        return jax.tree.map(lambda pool, laid: _put(pool, laid[index], fresh[index], owners[index]), pages, incoming)

    return jax.lax.fori_loop(0, rows * spread, put, pages)


def _put(
    pool: Shaped[Array, "n planes k b *c"],
    page: Shaped[Array, "planes k b *c"],
    fresh: Bool[Array, " b"],
    owner: Int32[Array, ""],
) -> Shaped[Array, "n planes k b *c"]:
    """The pool with the fresh slots of one page in place."""
    old = jax.lax.dynamic_index_in_dim(pool, owner, keepdims=False)
    page = jnp.where(fresh.reshape(-1, *(1,) * (page.ndim - 3)), page, old)
    return jax.lax.dynamic_update_index_in_dim(pool, page, owner, 0)


def _lay_out(
    chunk: Shaped[Array, "t planes k *c"], offset: Array, spread: int, page_size: int
) -> Shaped[Array, "spread planes k b *c"]:
    """The chunk's keys and values as `spread` whole pages, the first token in slot `offset` of the first page."""
    room = jnp.zeros((spread * page_size, *chunk.shape[1:]), chunk.dtype)
    room = jax.lax.dynamic_update_slice_in_dim(room, chunk, offset, axis=0)
    return jnp.moveaxis(room.reshape(spread, page_size, *chunk.shape[1:]), 1, 3)
