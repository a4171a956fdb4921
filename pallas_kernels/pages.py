"""What a pool of pages is: one array, of one plane or two.

A page holds, of each of its tokens, a key and a value per head: two planes, keys first. In a pool of one plane the key
is its own value (multi-head latent attention, arXiv 2405.04434, caches so), and it is read once.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arrays import NewKeys, Pages


def page_shape(pages: Pages) -> tuple[int, int, int, int, int]:
    """n, planes, k, b, c."""
    n, planes, k, b, c = pages.shape
    return n, planes, k, b, c


def planes_of(keys: NewKeys, values: NewKeys | None) -> Float[Array, "s t planes k c"]:
    """A step's keys and values as the planes of a pool; without values, of one plane."""
    return jnp.stack([keys] if values is None else [keys, values], axis=2)


def keys_and_values(pages: Pages, read: Callable[[int], Any]) -> tuple[Any, Any]:
    """What `read` gives for the keys' plane and for the values'; where they are one, it is read once."""
    keys = read(0)
    return keys, keys if page_shape(pages)[1] == 1 else read(1)
