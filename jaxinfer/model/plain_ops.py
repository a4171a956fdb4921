"""The operations on weights as plain jnp: where no engine is at hand, for training and for asking shapes.

Knows: what the products mean; a quantised weight is decoded first. Knows no cache and no kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxinfer.arrays import Keys, Pages, Queries, Values
from jaxinfer.model.ops import HIGHEST, TokenBatch
from jaxinfer.model.quantised import Quantised, Weight


class PlainWeights:
    """The part of `Ops` that multiplies by weights; their docstrings hold here."""

    def matmul(
        self, x: Float[Array, "..."], weight: Weight, *, axes: int = 1, dtype: Any = None
    ) -> Float[Array, "..."]:
        """Contract the last `axes` axes of both."""
        last = tuple(range(-axes, 0))
        return jnp.tensordot(x, _decoded(weight), axes=(last, last), precision=HIGHEST, preferred_element_type=dtype)

    def grouped_matmul(
        self, x: Float[Array, "n i"], weight: Float[Array, "e *out i"] | Quantised, sizes: Int32[Array, " e"]
    ) -> Float[Array, "n *out"]:
        """Each row of x times the matrix of its group."""
        flat = _decoded(weight).reshape(weight.shape[0], -1, weight.shape[-1])
        return jax.lax.ragged_dot(x, flat.swapaxes(1, 2), sizes, HIGHEST).reshape(-1, *weight.shape[1:-1])

    def take(self, table: Float[Array, "v w"] | Quantised, ids: Int32[Array, "*any"]) -> Float[Array, "*any w"]:
        """Rows of a table by their number."""
        return _decoded(table)[ids]


def _decoded(weight: Weight) -> Float[Array, "..."]:
    return weight.dequantise() if isinstance(weight, Quantised) else weight


class ShapeOps(PlainWeights):
    """Stands in where only shapes are asked for: `init` needs some Ops, and no parameter depends on which."""

    def write(self, pages: Pages, keys: Keys, values: Values | None, batch: TokenBatch) -> Pages:
        """The pages as they were."""
        return pages

    def attend(self, queries: Queries, pages: Pages, batch: TokenBatch, **how: Any) -> Queries:
        """The queries as they were, which is the right shape."""
        return queries
