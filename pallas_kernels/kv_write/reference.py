"""What a write means: token by token, each key and value into the page and slot that own its position."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from pallas_kernels.arrays import NewKeys, Pages, PageTable, Positions
from pallas_kernels.pages import as_stored, page_shape


def kv_write(pages: Pages, keys: NewKeys, values: NewKeys | None, page_table: PageTable, positions: Positions) -> Pages:
    """The pool with the step's keys and values stored in its form; tokens at position -1 are dropped. DONATES pages.

    Position i of row s goes to page `page_table[s, i // b]`, slot i % b. No two rows may write the same slot. values is
    None for a pool of one plane.
    """
    count, _, _, page_size, _ = page_shape(pages)
    where = jnp.maximum(positions, 0)
    owners = jnp.take_along_axis(page_table, where // page_size, axis=1)
    # Past the end, and never -1: a scatter to -1 wraps round to the last page even with mode="drop".
    owners = jnp.where(positions < 0, count, owners)

    def store(pool: Shaped[Array, "n planes k b *c"], fresh: Shaped[Array, "s t planes k *c"]) -> Array:
        return pool.at[owners, :, :, where % page_size].set(fresh, mode="drop")

    return jax.tree.map(store, pages, as_stored(pages, keys, values))
