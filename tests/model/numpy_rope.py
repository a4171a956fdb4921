"""Rotary embedding again, in float64 numpy, pair by pair: every kind read off the wavelengths that it gives.

Shares no code with the model; written from the papers and from what Hugging Face's checkpoints mean.
"""

import math

import numpy as np

from jaxinfer.config import RopeConfig


def wavelengths(rope: RopeConfig, size: int, position: int, context: int) -> np.ndarray:
    """Positions per full turn of each pair of `size` features that turn, for a token at `position`."""
    theta = rope.theta
    if rope.kind == "dynamic":
        length = max(position + 1, rope.original_context)
        theta *= (rope.factor * length / rope.original_context - (rope.factor - 1)) ** (size / (size - 2))
    return np.array(
        [stretched(rope, 2 * math.pi * theta ** (2 * i / size), i, size, context) for i in range(size // 2)]
    )


def stretched(rope: RopeConfig, wave: float, pair: int, size: int, context: int) -> float:
    """`wave` of pair number `pair` as `rope` stretches it; of dynamic it is stretched already."""
    if rope.kind == "linear":
        return wave * rope.factor
    if rope.kind == "longrope":
        return wave * (rope.long_factors if context > rope.original_context else rope.short_factors)[pair]
    if rope.kind == "llama3":
        return llama3_wavelength(rope, wave)
    if rope.kind == "yarn":
        return blended(wave, rope.factor, yarn_share(rope, pair, size))
    return wave


def blended(wave: float, factor: float, kept: float) -> float:
    """Frequencies are blended, not wavelengths: `kept` of the plain one, the rest of the divided one."""
    return 1 / (kept / wave + (1 - kept) / (factor * wave))


def llama3_wavelength(rope: RopeConfig, wave: float) -> float:
    longest_kept = rope.original_context / rope.high_freq_factor
    shortest_stretched = rope.original_context / rope.low_freq_factor
    if wave < longest_kept:
        return wave
    if wave > shortest_stretched:
        return wave * rope.factor
    smooth = (rope.original_context / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return blended(wave, rope.factor, smooth)


def yarn_share(rope: RopeConfig, pair: int, size: int) -> float:
    """How much of pair number `pair` stays: all up to the pair of beta_fast turns, nothing from beta_slow's on."""
    first, last = (
        size / 2 * math.log(rope.original_context / (2 * math.pi * turns), rope.theta)
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    return 1 - min(max((pair - first) / (last - first), 0), 1)


def turn(x: np.ndarray, position: int, rope: RopeConfig, context: int) -> np.ndarray:
    """One head at one position: pair i, seen as a complex number, turns by 2 pi position / wavelength."""
    size = rope.dim or len(x)
    angles = 2 * math.pi * position / wavelengths(rope, size, position, context)
    turned = (x[: size // 2] + 1j * x[size // 2 : size]) * np.exp(1j * angles) * rope.attention_factor
    return np.concatenate([turned.real, turned.imag, x[size:]])
