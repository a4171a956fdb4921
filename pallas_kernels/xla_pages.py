"""The reading of pages, as XLA on CPU does it fast.

One slice a page, put together, and no gather, which XLA on CPU copies number by number. Page numbers out of range are
clamped.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from pallas_kernels.arrays import Pages
from pallas_kernels.pages import as_float32, page_shape


def page_owners(
    table: Int32[Array, "i p"], page: Int32[Array, "i m"], owned: Bool[Array, "i m"]
) -> Int32[Array, "i m"]:
    """The entries of each row's table, and page 0 where the row owns none."""
    return jnp.where(owned, jnp.take_along_axis(table, jnp.minimum(page, table.shape[1] - 1), axis=1), 0)


def silence(values: Float[Array, "i k y c"], seen: Bool[Array, "i y"]) -> Float[Array, "i k y c"]:
    """0 for what nobody sees: a weight of 0 does not silence a NaN in a slot that was never written.

    Keys need it only where their scores are not masked after the product.
    """
    return jnp.where(seen[:, None, :, None], values, 0.0)


def read_page(pages: Pages, page: Int32[Array, ""], which: int) -> Float[Array, "1 k b c"]:
    """Keys (which = 0) or values (1) of a page in float32; of a pool of int8, this page alone becomes that."""

    def cut(pool: Shaped[Array, "n planes k b *c"]) -> Shaped[Array, "1 k b *c"]:
        start = (page, which, *(0,) * (pool.ndim - 2))
        return jax.lax.dynamic_slice(pool, start, (1, 1, *pool.shape[2:]))[0]

    return as_float32(jax.tree.map(cut, pages))


def read_side_by_side(pages: Pages, owners: Int32[Array, "i m"], which: int) -> Float[Array, "i k y c"]:
    """The m pages of each row, one behind the other under each head.

    Written into place: put together along an inner axis they would be copied number by number.
    """
    _, _, k, b, c = page_shape(pages)
    room = jnp.zeros((owners.shape[0], k, owners.shape[1] * b, c))
    for row, owned in enumerate(owners):
        for place, page in enumerate(owned):
            room = jax.lax.dynamic_update_slice(room, read_page(pages, page, which), (row, 0, place * b, 0))
    return room
