"""Plain weights made into quantised ones: int8 per output channel, int4 in groups.

Knows: how whole numbers and scales are chosen, by rounding to nearest, without data. What a quantised leaf means is
`model.quantised`'s; files that are quantised already are `gguf_blocks`'.
"""

from math import prod

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Shaped

from jaxinfer.model.quantised import Kind, Quantised, kind_of, scale_dtype, scale_shape

_PIECE = 2**20
"""Most values worked on at a time: 4 MiB in float32."""


def quantise(path: tuple[str, ...], weight: Float[np.ndarray, "..."], kind: Kind) -> Quantised:
    """The matrix of the leaf at `path`, in host memory, as `kind`, or as what `kind_of` says for it.

    int8 is symmetric: the largest magnitude of an output channel is 127 steps. int4 is not: each group's least and
    greatest value are its ends, 15 steps apart. Values are rounded against the scale as it is stored. A piece of the
    weight at a time is in float32 beside the result.
    """
    kind = kind_of(path, kind)
    groups = scale_shape(path, weight.shape, kind)
    group = prod(weight.shape) // prod(groups)
    rows = weight.reshape(-1, group)
    values = np.empty(rows.shape, jnp.int4 if kind == "int4" else np.int8)
    dtype = scale_dtype(kind, weight.dtype)
    scale, offset = np.empty(len(rows), dtype), np.empty(len(rows) if kind == "int4" else 0, dtype)
    step = max(1, _PIECE // group)
    for start in range(0, len(rows), step):
        at = slice(start, start + step)
        wide = rows[at].astype(np.float32)
        if kind == "int4":
            values[at], scale[at], offset[at] = _between_ends(wide, dtype)
        else:
            values[at], scale[at] = _around_zero(wide, dtype)
    shaped = (values.reshape(weight.shape), scale.reshape(groups), offset.reshape(groups) if offset.size else None)
    return Quantised(*shaped, weight.dtype.name)


def _around_zero(
    rows: Float32[np.ndarray, "r n"], dtype: np.dtype
) -> tuple[Float32[np.ndarray, "r n"], Shaped[np.ndarray, " r"]]:
    """Whole numbers from -127 to 127 and their scales."""
    scale = (np.abs(rows).max(axis=1) / 127).astype(dtype)
    return np.clip(np.rint(rows / _divisor(scale)), -127, 127), scale


def _between_ends(
    rows: Float32[np.ndarray, "r n"], dtype: np.dtype
) -> tuple[Float32[np.ndarray, "r n"], Shaped[np.ndarray, " r"], Shaped[np.ndarray, " r"]]:
    """Whole numbers from -8 to 7, their scales, and what 0 stands for."""
    low = rows.min(axis=1)
    scale = ((rows.max(axis=1) - low) / 15).astype(dtype)
    offset = (low + 8 * scale.astype(np.float32)).astype(dtype)
    return np.clip(np.rint((rows - offset[:, None].astype(np.float32)) / _divisor(scale)), -8, 7), scale, offset


def _divisor(scale: Shaped[np.ndarray, " r"]) -> Float32[np.ndarray, "r 1"]:
    """What to divide a group by: 1 where all of it is the same number, and so any number of steps is 0."""
    wide = scale.astype(np.float32)[:, None]
    return np.where(wide == 0, np.float32(1), wide)
