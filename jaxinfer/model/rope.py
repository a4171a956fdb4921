"""Rotary position embedding: how fast the pairs of a head's features turn, and turning them.

Knows: every kind of stretching, and the dtype of angles. Knows nothing of rows, of the cache or of families.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64

from jaxinfer.arrays import Positions
from jaxinfer.config import RopeConfig

Phases = tuple[Float32[Array, "s t half"], Float32[Array, "s t half"]]
"""Cosine and sine of every token's rotary angles times the attention factor, float32; one of each a turning pair."""


def rope_frequencies(rope: RopeConfig, head_dim: int, context: int) -> Float32[np.ndarray, " half"]:
    """Radians that each turning pair of a head's features turns by per position; made in float64 and rounded once.

    `context` is the most tokens that a sequence may have. longrope takes its long factors where that is more than
    `original_context`, for every sequence of the model, as vLLM and llama.cpp do: a sequence that changed its factors
    on the way would read keys turned by other ones. (transformers changes them, and computes its prompt anew.)
    dynamic has here the frequencies of the positions within `original_context`.
    """
    size = rope.turning(head_dim)
    frequencies = rope.theta ** -(np.arange(0, size, 2) / size)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _stretch_llama3(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies = _stretch_yarn(rope, frequencies)
    elif rope.kind == "longrope":
        frequencies = frequencies / (rope.short_factors if context <= rope.original_context else rope.long_factors)
    return frequencies.astype(np.float32)


def _stretch_llama3(rope: RopeConfig, frequencies: Float64[np.ndarray, " half"]) -> Float64[np.ndarray, " half"]:
    """Divide low frequencies by `factor`, leave high ones, blend linearly in between (Llama 3.1's `rope_scaling`)."""
    turns = rope.original_context * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / rope.factor)


def _stretch_yarn(rope: RopeConfig, frequencies: Float64[np.ndarray, " half"]) -> Float64[np.ndarray, " half"]:
    """Keep the pairs before the one of `beta_fast` turns, divide those past `beta_slow`, blend by index in between."""
    pairs = len(frequencies)
    low, high = (_pair_of_turns(rope, turns, pairs) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high = high + 0.001 if low == high else high  # a step in place of a ramp, as in the paper's own code
    divide = np.clip((np.arange(pairs) - low) / (high - low), 0.0, 1.0)
    return frequencies * (1 - divide + divide / rope.factor)


def _pair_of_turns(rope: RopeConfig, turns: float, pairs: int) -> float:
    """The pair, a fraction, that makes `turns` turns over `original_context` (arXiv 2309.00071, section 3.2)."""
    return pairs * math.log(rope.original_context / (2 * math.pi * turns)) / math.log(rope.theta)


def _stretch_dynamic(rope: RopeConfig, pairs: int, positions: Positions) -> Float32[Array, "s t half"]:
    """What dynamic multiplies each frequency by at each position.

    theta grows by s^(d / (d - 2)) in a sequence of n tokens, s = 1 + factor (n - original) / original, so pair i of d/2
    turns s^(-i / (d/2 - 1)) as fast. n is the position + 1: a token is turned as the last of its sequence, however its
    prompt is cut into steps. transformers does the same token by token; given a whole prompt, it turns all of it by the
    prompt's length.
    """
    beyond = jnp.maximum(positions + 1 - rope.original_context, 0).astype(jnp.float32)
    stretch = jnp.log1p(beyond * (rope.factor / rope.original_context))
    return jnp.exp(-stretch[..., None] * (np.arange(pairs, dtype=np.float32) / (pairs - 1)))


def rope_phases(rope: RopeConfig, head_dim: int, positions: Positions, context: int) -> Phases:
    """Cosine and sine of position x frequency, times `attention_factor`; as wide as half of the features that turn.

    Float32: in bfloat16 position 257 would be 256. context: see `rope_frequencies`.
    """
    frequencies = rope_frequencies(rope, head_dim, context)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    if rope.kind == "dynamic":
        angles = angles * _stretch_dynamic(rope, len(frequencies), positions)
    cos, sin = jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
    keep = functools.partial(_keep, rope.attention_factor)
    return jax.lax.platform_dependent(cos, sin, cpu=keep, default=lambda *same: same)


def _keep(bound: float, cos: Float32[Array, "s t half"], sin: Float32[Array, "s t half"]) -> Phases:
    """The same, but made once a step: XLA on CPU fuses a cosine into every layer that reads it, a barrier or not, and
    there computes it for each head (40 of 1,040 ms of a prefill). Through a branch that it cannot decide it does not.
    No cosine is above `bound`.
    """
    return jax.lax.cond(
        cos[0, 0, 0] <= bound, lambda *same: same, lambda *none: jax.tree.map(jnp.zeros_like, none), cos, sin
    )


def rotate(x: Float[Array, "s t *heads c"], phases: Phases) -> Float[Array, "s t *heads c"]:
    """Turn the pairs (x[i], x[i + h]) by their h phases: the half-split convention of Hugging Face checkpoints.

    With phases narrower than c / 2 the first 2h features turn among themselves, and the rest passes as it is.
    """
    cos, sin = (jnp.expand_dims(phase, tuple(range(2, x.ndim - 1))) for phase in phases)
    size = 2 * cos.shape[-1]
    turning, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    first, second = jnp.split(turning.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if rest is None else jnp.concatenate([turned, rest], axis=-1)
