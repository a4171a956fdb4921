"""Rotary position embedding: how fast the pairs of a head's features turn, and turning them.

Knows: every kind of stretching, and the dtype of angles. Knows nothing of rows, of the cache or of families.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64

from jaxinfer.arrays import Positions
from jaxinfer.config import RopeConfig

Phases = tuple[Float32[Array, "s t half"], Float32[Array, "s t half"]]
"""Cosine and sine of every token's rotary angles, float32."""


def _stretch_llama3(rope: RopeConfig, frequencies: Float64[np.ndarray, " half"]) -> Float64[np.ndarray, " half"]:
    """Divide low frequencies by `factor`, leave high ones, blend linearly in between (Llama 3.1's `rope_scaling`)."""
    turns = rope.original_context * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / rope.factor)


def rope_frequencies(rope: RopeConfig, head_dim: int, context: int) -> Float32[np.ndarray, " half"]:
    """Radians that each pair of a head's features turns by per position; made in float64 and rounded once."""
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _stretch_llama3(rope, frequencies)
    elif rope.kind == "longrope":
        frequencies = frequencies / (rope.short_factors if context <= rope.original_context else rope.long_factors)
    return frequencies.astype(np.float32)


def rope_phases(rope: RopeConfig, head_dim: int, positions: Positions, context: int) -> Phases:
    """Cosine and sine of position x frequency. Float32: in bfloat16 position 257 would be 256."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim, context)
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
