"""What a pool of pages is: one array, or int8 numbers with their scales; of one plane or two.

A page holds, of each of its tokens, a key and a value per head: two planes, keys first. In a pool of one plane the key
is its own value (multi-head latent attention, arXiv 2405.04434, caches so), and it is read once.

An int8 key or value is 127 / absmax times what it stands for, rounded, with absmax / 127 beside it: symmetric, one
scale per head and token, so that a token is written once and for all (a scale per page would change with each token).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.arrays import Int8Pages, NewKeys, Pages

LEVELS = 127
"""int8 from -127 to 127; -128 is left out, so that a number and its negative are stored alike."""


def empty_pages(shape: tuple[int, int, int, int, int], dtype: Any) -> Pages:
    """A pool [n, planes, k, b, c] of zeros; of dtype int8, with scales."""
    if jnp.dtype(dtype) == jnp.int8:
        return Int8Pages(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
    return jnp.zeros(shape, dtype)


def page_shape(pages: Pages) -> tuple[int, int, int, int, int]:
    """n, planes, k, b, c."""
    n, planes, k, b, c = (pages.numbers if isinstance(pages, Int8Pages) else pages).shape
    return n, planes, k, b, c


def as_stored(pages: Pages, keys: NewKeys, values: NewKeys | None) -> Any:
    """A step's keys and values as `pages` holds them: the same leaves, [s, t, planes, k] and what follows.

    values is None for a pool of one plane.
    """
    planes = jnp.stack([keys] if values is None else [keys, values], axis=2)
    return quantise(planes) if isinstance(pages, Int8Pages) else planes.astype(pages.dtype)


def quantise(x: Float[Array, "*any c"]) -> Int8Pages:
    """int8 numbers and their scales, none further off than half a scale. Zeros have the scale 0.

    What is not finite makes its scale NaN, and with it all that is read again.
    """
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1) / LEVELS
    scales = jnp.where(jnp.isfinite(x).all(axis=-1), scales, jnp.nan)  # XLA's maximum on CPU may pass over a NaN
    levels = jnp.round(x / jnp.where(scales == 0, 1.0, scales)[..., None])
    return Int8Pages(jnp.clip(levels, -LEVELS, LEVELS).astype(jnp.int8), scales)


def as_float32(stored: Any) -> Float32[Array, "*any c"]:
    """Part of a pool, cut alike out of each of its leaves, as the numbers that it stands for."""
    if isinstance(stored, Int8Pages):
        return stored.numbers.astype(jnp.float32) * stored.scales[..., None]
    return stored.astype(jnp.float32)


def keys_and_values(pages: Pages, read: Callable[[int], Any]) -> tuple[Any, Any]:
    """What `read` gives for the keys' plane and for the values'; where they are one, it is read once."""
    keys = read(0)
    return keys, keys if page_shape(pages)[1] == 1 else read(1)
