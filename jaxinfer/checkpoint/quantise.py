"""Plain weights made into quantised ones: int8 per output channel, int4 in groups.

Knows: how whole numbers and scales are chosen, by rounding to nearest, without data. What a quantised leaf means is
`model.quantised`'s; files that are quantised already are `gguf_blocks`'.
"""

from math import prod

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Shaped

from jaxinfer.errors import CheckpointError
from jaxinfer.model.quantised import Kind, Quantised, kind_of, scale_dtype, scale_shape

_PIECE = 2**20
"""Most values worked on at a time: 4 MiB in float32."""
_FITS = 5
"""Rounds of fitting an int4 group; later ones change little."""


def quantise(path: tuple[str, ...], weight: Float[np.ndarray, "..."], kind: Kind) -> Quantised:
    """The matrix of the leaf at `path`, in host memory, as `kind`, or as what `kind_of` says for it.

    int8 is symmetric: the largest magnitude of an output channel is 127 steps. int4 is not: each group has 16 steps
    between its least and its greatest value, fitted to its values by least squares. Values are rounded against the
    scale as it is stored. A piece of the weight at a time is in float32 beside the result. Raises CheckpointError for a
    weight that is not finite.
    """
    kind = kind_of(path, kind, weight.shape)
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
        if not np.isfinite(wide).all():
            raise CheckpointError(f"{'/'.join(path)} holds numbers that are not finite, which {kind} cannot keep")
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


Grouped = tuple[Float32[np.ndarray, "r n"], Shaped[np.ndarray, " r"], Shaped[np.ndarray, " r"]]


def _between_ends(rows: Float32[np.ndarray, "r n"], dtype: np.dtype) -> Grouped:
    """Whole numbers from -8 to 7, their scales, and what 0 stands for.

    From the ends inward: scale and offset are fitted to the numbers that came out, and the numbers to those, as long
    as a group's squared error falls.
    """
    low, high = rows.min(axis=1), rows.max(axis=1)
    best = _round(rows, (high - low) / 15, low + 8 * ((high - low) / 15), dtype)
    least = _error(rows, best)
    for _ in range(_FITS):
        found = _round(rows, *_fit(rows, best[0]), dtype)
        error = _error(rows, found)
        better = error < least
        for kept, new in zip(best, found, strict=True):
            kept[better] = new[better]
        least = np.where(better, error, least)
    return best


def _round(
    rows: Float32[np.ndarray, "r n"],
    scale: Float32[np.ndarray, " r"],
    offset: Float32[np.ndarray, " r"],
    dtype: np.dtype,
) -> Grouped:
    scale, offset = scale.astype(dtype), offset.astype(dtype)
    steps = (rows - offset[:, None].astype(np.float32)) / _divisor(scale)
    return np.clip(np.rint(steps), -8, 7), scale, offset


def _fit(
    rows: Float32[np.ndarray, "r n"], numbers: Float32[np.ndarray, "r n"]
) -> tuple[Float32[np.ndarray, " r"], Float32[np.ndarray, " r"]]:
    """The line through (number, weight) of each group: its slope and where it passes 0."""
    middle, mean = numbers.mean(axis=1), rows.mean(axis=1)
    spread = ((numbers - middle[:, None]) ** 2).sum(axis=1)
    slope = ((numbers - middle[:, None]) * rows).sum(axis=1) / np.where(spread == 0, 1, spread)
    return slope, mean - slope * middle


def _error(rows: Float32[np.ndarray, "r n"], found: Grouped) -> Float32[np.ndarray, " r"]:
    numbers, scale, offset = (x.astype(np.float32) for x in found)
    return ((numbers * scale[:, None] + offset[:, None] - rows) ** 2).sum(axis=1)


def _divisor(scale: Shaped[np.ndarray, " r"]) -> Float32[np.ndarray, "r 1"]:
    """What to divide a group by: 1 where all of it is the same number, and so any number of steps is 0."""
    wide = scale.astype(np.float32)[:, None]
    return np.where(wide == 0, np.float32(1), wide)
