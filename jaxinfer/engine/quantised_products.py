"""Products with quantised weights: their axes as the kernels take them, and the rows of a quantised table.

Knows: how a `Quantised` of many axes becomes values [o, i] with scales [o, groups], and when it had better not. Knows
no kernel: the form comes in.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxinfer.model.ops import HIGHEST
from jaxinfer.model.quantised import Quantised


def matmul(
    x: Float[Array, "..."], weight: Quantised, *, axes: int, dtype: Any, form: Callable[..., Any]
) -> Float[Array, "..."]:
    """Contract the last `axes` axes of both by `form` of quant_matmul; the result is of `dtype`, or of x's if None."""
    kept, out, dtype = x.shape[:-axes], weight.shape[:-axes], dtype or x.dtype
    values, scale, offset = _flattened(weight, axes)
    return form(x.reshape(prod(kept), -1), values, scale, offset, dtype=dtype).reshape(*kept, *out)


def matmul_in_all_axes(x: Float[Array, "..."], weight: Quantised, *, axes: int, dtype: Any) -> Float[Array, "..."]:
    """As `matmul` in plain XLA, the weight's axes as they are.

    So one that is split over devices along an inner axis needs no gather, and one whose inner axes a TPU tiles is not
    laid out anew.
    """
    dims = (tuple(range(x.ndim - axes, x.ndim)), tuple(range(weight.ndim - axes, weight.ndim)))
    if weight.offset is not None or any(size > 1 for size in weight.scale.shape[-axes:]):
        whole = weight.dequantise().astype(x.dtype)
        return jax.lax.dot_general(x, whole, (dims, ((), ())), HIGHEST, dtype or x.dtype)
    whole = weight.values.astype(x.dtype)
    product = jax.lax.dot_general(x, whole, (dims, ((), ())), HIGHEST, jnp.float32)
    return (product * weight.scale.reshape(weight.shape[:-axes])).astype(dtype or x.dtype)


def take(table: Quantised, ids: Int32[Array, "*any"]) -> Float[Array, "*any w"]:
    """Rows of a table by their number, decoded: only those that are taken."""
    return jax.tree.map(lambda part: part[ids], table).dequantise()


def _flattened(weight: Quantised, axes: int) -> tuple[Array, Array, Array | None]:
    """Values [o, i], scales [o, groups], offsets alike or None."""
    rows = prod(weight.shape[:-axes])
    offset = None if weight.offset is None else weight.offset.reshape(rows, -1)
    return weight.values.reshape(rows, -1), weight.scale.reshape(rows, -1), offset
