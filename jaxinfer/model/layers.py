"""The small parts of a decoder block: weights, norm, rotary phases, softcap, MLP.

Knows: the arithmetic and the dtype each piece is computed in. Knows nothing of the cache, of rows or of step shapes.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Float32, Float64

from jaxinfer.arrays import Hidden, Positions
from jaxinfer.config import Activation, ModelConfig, RopeConfig
from jaxinfer.model.ops import Ops

Phases = tuple[Float32[Array, "s t half"], Float32[Array, "s t half"]]
"""Cosine and sine of every token's rotary angles, float32."""

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


def _stretch_llama3(rope: RopeConfig, frequencies: Float64[np.ndarray, " half"]) -> Float64[np.ndarray, " half"]:
    """Divide low frequencies by `factor`, leave high ones, blend linearly in between (Llama 3.1's `rope_scaling`)."""
    turns = rope.original_context * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / rope.factor)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Float32[np.ndarray, " half"]:
    """Radians that each pair of a head's features turns by per position; made in float64 and rounded once."""
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _stretch_llama3(rope, frequencies)
    return frequencies.astype(np.float32)


def rope_phases(rope: RopeConfig, head_dim: int, positions: Positions) -> Phases:
    """Cosine and sine of position x frequency. Float32: in bfloat16 position 257 would be 256."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    return jax.lax.platform_dependent(jnp.cos(angles), jnp.sin(angles), cpu=_keep, default=lambda *same: same)


def _keep(cos: Float32[Array, "s t half"], sin: Float32[Array, "s t half"]) -> Phases:
    """The same, but made once a step: XLA on CPU fuses a cosine into every layer that reads it, a barrier or not, and
    there computes it for each head (40 of 1,040 ms of a prefill). Through a branch that it cannot decide it does not.
    """
    return jax.lax.cond(
        cos[0, 0, 0] <= 1, lambda *same: same, lambda *none: jax.tree.map(jnp.zeros_like, none), cos, sin
    )


def rotate(x: Float[Array, "s t *heads c"], phases: Phases) -> Float[Array, "s t *heads c"]:
    """Turn the pairs (x[i], x[i + c/2]) by their phases: the half-split convention of Hugging Face checkpoints."""
    cos, sin = (jnp.expand_dims(phase, tuple(range(2, x.ndim - 1))) for phase in phases)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


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
