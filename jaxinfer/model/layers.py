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

CLAMP, SLOPE = 7.0, 1.702
"""gpt-oss's gate: clamped at CLAMP, a sigmoid of SLOPE times the gate."""


def _swiglu_clamped(gate: Float[Array, "*any"], up: Float[Array, "*any"]) -> Float[Array, "*any"]:
    gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
    return gate * jax.nn.sigmoid(SLOPE * gate) * (up + 1)


ACTIVATIONS: dict[Activation, Callable[[Array, Array], Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu": lambda gate, up: jax.nn.gelu(gate, approximate=False) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "swiglu_clamped": _swiglu_clamped,
}
"""What becomes of an MLP's gate and up (arXiv 2002.05202)."""


def weight(module: nn.Module, name: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> Array:
    """Declare a matrix of `module`: the one place that names its shape, dtype and logical axes.

    Drawn from a normal distribution of standard deviation 1 / sqrt(last axis), which every matrix is contracted on.
    """
    init = nn.initializers.normal(1 / math.sqrt(shape[-1]))
    return cast(Array, module.param(name, nn.with_logical_partitioning(init, axes), shape, dtype))


def bias(module: nn.Module, name: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> Array:
    """Declare a vector that is added, or one per head or expert; zero until it is loaded."""
    init = nn.with_logical_partitioning(nn.initializers.zeros, axes)
    return cast(Array, module.param(name, init, shape, dtype))


def norm_weight(module: nn.Module, name: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """Declare a norm's weight, float32 whatever the model's dtype and ready to multiply."""
    init = nn.with_logical_partitioning(nn.initializers.ones, axes)
    return cast(Array, module.param(name, init, shape, jnp.float32))


def rms_norm(x: Float[Array, "..."], weight: Float32[Array, "..."], eps: float) -> Float[Array, "..."]:
    """x / rms(x) * weight over the axes that `weight` has, the last ones (arXiv 1910.07467), in float32."""
    wide, axes = x.astype(jnp.float32), tuple(range(-weight.ndim, 0))
    mean_square = jnp.mean(jnp.square(wide), axis=axes, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps) * weight).astype(x.dtype)


def softcap(x: Float[Array, "*any"], cap: float | None) -> Float[Array, "*any"]:
    """cap * tanh(x / cap): bounded, and nearly x where x is small. None leaves x alone."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class MLP(nn.Module):
    """down(activation(gate x, up x)) of inner width `inner`; gate and up are one matrix, so x is read once."""

    config: ModelConfig
    dtype: Any
    inner: int

    @nn.compact
    def __call__(self, x: Hidden, ops: Ops) -> Hidden:
        """The MLP's addition to the residual stream."""
        config, width, inner = self.config, self.config.width, self.inner
        gate_up = weight(self, "gate_up", ("gate_up", "mlp", "width"), (2, inner, width), self.dtype)
        both = ops.matmul(x, gate_up)  # [s, t, 2, f]
        if config.mlp_bias:
            both = both + bias(self, "gate_up_bias", ("gate_up", "mlp"), (2, inner), self.dtype)
        hidden = ACTIVATIONS[config.activation](both[..., 0, :], both[..., 1, :])
        added = ops.matmul(hidden, weight(self, "down", ("width", "mlp"), (width, inner), self.dtype))
        return added + bias(self, "down_bias", ("width",), (width,), self.dtype) if config.mlp_bias else added
