"""An online softmax (arXiv 2205.14135) as XLA on CPU does it fast; x query heads a row.

In products a far smaller operand goes right, where XLA on CPU packs it anew at every call.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

LOWEST = float(jnp.finfo(jnp.float32).min)


class Softmax(NamedTuple):
    """So far: the highest score, the sum of weights, the weighted sum of values."""

    peak: Float[Array, "i k x"]
    total: Float[Array, "i k x"]
    mixed: Float[Array, "i k x c"]


def beginning(queries: Float[Array, "i k x c"], sinks: Float32[Array, "k x"] | None) -> Softmax:
    """Where a softmax begins: with nothing, or with the sinks, which weigh and add no value."""
    flat, mixed = jnp.zeros(queries.shape[:3]), jnp.zeros_like(queries)
    return Softmax(flat + LOWEST, flat, mixed) if sinks is None else Softmax(flat + sinks, flat + 1.0, mixed)


def product_precision(dtype: Any) -> jax.lax.Precision:
    """What the products ask of the compiler for queries of `dtype`, though both sides are float32 by then.

    Where float32 was asked for, a TPU would take bfloat16 and a GPU TF32. Queries of bfloat16 come with a model whose
    products are no better than that, and the best would take six passes of a TPU, or a GPU's slow units.
    """
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def meet(
    queries: Float[Array, "i k x c"],
    keys: Float[Array, "i k y c"],
    values: Float[Array, "i k y c"],
    seen: Bool[Array, "*i 1 #x y"],
    softcap: float | None,
    precision: jax.lax.Precision,
) -> Softmax:
    """The softmax over y keys alone. A query that sees none of them averages anything, at peak LOWEST.

    precision: of the products, by `product_precision`.
    """
    scores = _dot_keys(queries, keys, precision)
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen, scores, LOWEST)
    peak = scores.max(axis=-1)
    weights = jnp.exp(scores - peak[..., None])
    mixed = jnp.einsum("ikxy,ikyc->ikxc", weights, values, precision=precision)
    return Softmax(peak, weights.sum(axis=-1), mixed)


def _dot_keys(
    queries: Float[Array, "i k x c"], keys: Float[Array, "i k y c"], precision: jax.lax.Precision
) -> Float[Array, "i k x y"]:
    if 4 * queries.shape[2] <= keys.shape[2]:  # from here on it pays for turning the product around
        return jnp.einsum("ikyc,ikxc->ikyx", keys, queries, precision=precision).swapaxes(2, 3)
    return jnp.einsum("ikxc,ikyc->ikxy", queries, keys, precision=precision)


def merge(one: Softmax, other: Softmax) -> Softmax:
    """The softmax over the keys of both. What a query averaged while it saw nothing fades to 0."""
    peak = jnp.maximum(one.peak, other.peak)
    fade, wane = jnp.exp(one.peak - peak), jnp.exp(other.peak - peak)
    mixed = one.mixed * fade[..., None] + other.mixed * wane[..., None]
    return Softmax(peak, one.total * fade + other.total * wane, mixed)


def average(state: Softmax) -> Float[Array, "i k x c"]:
    """The weighted mean of the values; 0 where nothing was met."""
    return state.mixed / jnp.where(state.total == 0, 1.0, state.total)[..., None]
