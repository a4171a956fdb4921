"""The small parts of a decoder block: weights, norm, softcap, MLP.

Knows: the arithmetic and the dtype each piece is computed in. Knows nothing of the cache, of rows or of step shapes.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Float32

from jaxinfer.arrays import Hidden
from jaxinfer.config import Activation, ModelConfig
from jaxinfer.model.ops import Ops

ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def weight(module: nn.Module, name: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> Array:
    """Declare a matrix of `module`: the one place that names its shape, dtype and logical axes.

    Drawn from a normal distribution of standard deviation 1 / sqrt(last axis), which every matrix is contracted on.
    """
    init = nn.initializers.normal(1 / math.sqrt(shape[-1]))
    return cast(Array, module.param(name, nn.with_logical_partitioning(init, axes), shape, dtype))


def norm_weight(module: nn.Module, name: str, axis: str, size: int) -> Float32[Array, " size"]:
    """Declare a norm's weight, float32 whatever the model's dtype and ready to multiply."""
    init = nn.with_logical_partitioning(nn.initializers.ones, (axis,))
    return cast(Array, module.param(name, init, (size,), jnp.float32))


def rms_norm(x: Float[Array, "*any c"], weight: Float32[Array, " c"], eps: float) -> Float[Array, "*any c"]:
    """x / rms(x) * weight over the last axis (arXiv 1910.07467), in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps) * weight).astype(x.dtype)


def softcap(x: Float[Array, "*any"], cap: float | None) -> Float[Array, "*any"]:
    """cap * tanh(x / cap): bounded, and nearly x where x is small. None leaves x alone."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class MLP(nn.Module):
    """down(activation(gate x) * up x) (arXiv 2002.05202); gate and up are one matrix, so x is read once."""

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: Hidden, ops: Ops) -> Hidden:
        """The MLP's addition to the residual stream."""
        width, inner = self.config.width, self.config.mlp_width
        gate_up = weight(self, "gate_up", ("gate_up", "mlp", "width"), (2, inner, width), self.dtype)
        down = weight(self, "down", ("width", "mlp"), (width, inner), self.dtype)
        both = ops.matmul(x, gate_up)  # [s, t, 2, f]
        return ops.matmul(ACTIVATIONS[self.config.activation](both[..., 0, :]) * both[..., 1, :], down)
