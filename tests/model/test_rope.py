"""Rotary phases of every kind against wavelengths in float64; what turning keeps and what it leaves alone."""

from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import RopeConfig
from jaxinfer.model.rope import Phases, rope_frequencies, rope_phases, rotate

from . import numpy_rope

CONTEXT = 2**17
HEAD = 64
FACTORS = {
    "short_factors": tuple(1 + 0.02 * i for i in range(HEAD // 2)),
    "long_factors": tuple(1 + 1.5 * i for i in range(HEAD // 2)),
}
ROPES = {
    "default": RopeConfig(theta=1e5),
    "linear": RopeConfig(theta=1e6, kind="linear", factor=8.0),
    "dynamic": RopeConfig(theta=1e4, kind="dynamic", factor=4.0),
    "llama3": RopeConfig(theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": RopeConfig(theta=1e4, kind="yarn", factor=4.0, attention_factor=1.1386),
    "yarn not rounded": RopeConfig(theta=1.5e5, kind="yarn", factor=32.0, attention_factor=1.3466, truncate=False),
    "yarn of other turns": RopeConfig(theta=1e4, kind="yarn", factor=40.0, beta_fast=16.0, beta_slow=2.0),
    "longrope": RopeConfig(theta=1e4, kind="longrope", attention_factor=1.19, **FACTORS),
    "a part of a head": RopeConfig(theta=1e4, dim=48),
    "yarn on a part": RopeConfig(theta=1e4, kind="yarn", factor=4.0, attention_factor=0.9, dim=16),
}
ABSOLUTE = {"dynamic"}
"""Kinds that turn a token by where it stands, not only by how far it stands from another."""


POSITIONS = (0, 1, 3, 4, 7, 103, 107, 8191, 8192, 10_003, 10_007, 4 * 8192)


@cache
def phases_of(name: str) -> Phases:
    """Of all POSITIONS at once: tracing and compiling a step is what takes the time."""
    return rope_phases(ROPES[name], HEAD, jnp.array([POSITIONS], jnp.int32), CONTEXT)


def turned(x: np.ndarray, position: int, name: str) -> np.ndarray:
    """One head of one token, [c], turned by the model."""
    which = POSITIONS.index(position)
    cos, sin = (phase[:, which : which + 1] for phase in phases_of(name))
    return np.asarray(rotate(jnp.asarray(x)[None, None, None], (cos, sin)))[0, 0, 0]


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("position", POSITIONS)
def test_phases_are_those_of_the_wavelengths(name: str, position: int) -> None:
    """Float32 rounds the frequency, the angle and, for dynamic, the stretch: an angle is off by 2^-22 of itself.

    That is 0.008 radians for the fastest pair at 4 x 8192, and nothing for the slow ones, which tell far tokens apart.
    """
    rope = ROPES[name]
    angles = 2 * np.pi * position / numpy_rope.wavelengths(rope, rope.turning(HEAD), position, CONTEXT)
    tolerance = (angles + 1) * 2**-22
    phases = np.stack(phases_of(name))[:, 0, POSITIONS.index(position)]
    off = np.abs(phases - rope.attention_factor * np.stack([np.cos(angles), np.sin(angles)]))
    assert (off <= tolerance).all(), (off / tolerance).max()


@pytest.mark.parametrize("name", ROPES)
def test_pairs_turn_as_complex_numbers(name: str) -> None:
    x = np.random.default_rng(0).standard_normal(HEAD).astype(np.float32)
    np.testing.assert_allclose(turned(x, 3, name), numpy_rope.turn(x, 3, ROPES[name], CONTEXT), atol=5e-6)


def test_the_second_reading_of_each_kind_is_pinned() -> None:
    """What each kind is for, asked of `numpy_rope`, so that it cannot drift with the model's."""
    plain, size = numpy_rope.wavelengths(RopeConfig(theta=1e4), HEAD, 0, CONTEXT), HEAD
    ratios = {}
    for name in ("llama3", "yarn", "yarn not rounded", "yarn of other turns", "longrope"):
        rope = replace(ROPES[name], theta=1e4)
        ratios[name] = numpy_rope.wavelengths(rope, size, 0, CONTEXT) / plain
        assert ratios[name][0] == 1
        assert ratios[name][-1] == pytest.approx(rope.long_factors[-1] if rope.long_factors else rope.factor)
        assert (np.diff(ratios[name]) >= -1e-9).all()
    assert (ratios["yarn not rounded"][5:20] != 1).any()
    dynamic = [numpy_rope.wavelengths(ROPES["dynamic"], size, p, CONTEXT) / plain for p in (8191, 8192, 2 * 8192 - 1)]
    np.testing.assert_array_equal(dynamic[0], 1)
    assert dynamic[1][-1] > 1
    assert dynamic[2][-1] == pytest.approx(4 * 2 - 3)  # the slowest pair is stretched as the sequence has grown


@pytest.mark.parametrize(("context", "factors"), [(8_192, "short_factors"), (8_193, "long_factors")])
def test_longrope_has_long_factors_where_a_sequence_may_pass_the_original_context(context: int, factors: str) -> None:
    plain = rope_frequencies(RopeConfig(theta=1e4), HEAD, context)
    np.testing.assert_allclose(plain / rope_frequencies(ROPES["longrope"], HEAD, context), FACTORS[factors], rtol=1e-6)


@pytest.mark.parametrize("name", ROPES)
def test_turning_keeps_lengths_but_for_the_attention_factor(name: str) -> None:
    rope, x = ROPES[name], np.random.default_rng(0).standard_normal(HEAD).astype(np.float32)
    size = rope.turning(HEAD)
    got = np.linalg.norm(turned(x, 10_007, name)[:size])
    assert got == pytest.approx(rope.attention_factor * np.linalg.norm(x[:size]), rel=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_rest_of_a_head_passes_bit_by_bit(dtype: jnp.dtype) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 4, HEAD)), dtype)
    positions = jnp.arange(6, dtype=jnp.int32).reshape(2, 3) + 7
    got = rotate(x, rope_phases(RopeConfig(dim=16), HEAD, positions, CONTEXT))
    np.testing.assert_array_equal(got[..., 16:], x[..., 16:])
    np.testing.assert_array_equal(got[..., :16], rotate(x[..., :16], rope_phases(RopeConfig(), 16, positions, CONTEXT)))
    assert not np.array_equal(got[..., :16], x[..., :16])


@pytest.mark.parametrize("name", ROPES)
def test_products_of_equal_distance_are_equal(name: str) -> None:
    """q at i + 10,000 against k at j + 10,000 scores as q at i against k at j, but with a rope of absolute angles."""
    q, k = np.random.default_rng(0).standard_normal((2, HEAD)).astype(np.float32)

    def score(i: int, j: int) -> float:
        return float(turned(q, i, name) @ turned(k, j, name))

    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)
    assert score(107, 103) == pytest.approx(score(7, 3), abs=1e-3)
    assert (score(10_007, 10_003) == pytest.approx(score(7, 3), abs=3e-2)) != (name in ABSOLUTE)


def test_dynamic_turns_a_token_alike_in_every_cut_of_its_prompt() -> None:
    rope, positions = replace(ROPES["dynamic"], original_context=8), jnp.arange(16, dtype=jnp.int32)[None]
    whole = rope_phases(rope, HEAD, positions, CONTEXT)
    parts = [rope_phases(rope, HEAD, positions[:, cut], CONTEXT) for cut in (slice(0, 9), slice(9, 16))]
    for phases, cut in zip(whole, zip(*parts, strict=True), strict=True):
        np.testing.assert_allclose(phases, np.concatenate(cut, axis=1), atol=1e-6)


def test_rope_of_bfloat16_is_computed_in_float32() -> None:
    """bfloat16 rounds 257 to 256: one position would read as another."""
    x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    phases = rope_phases(RopeConfig(), 8, jnp.array([[256, 257]]), CONTEXT)
    got = rotate(jnp.broadcast_to(x, (1, 2, 1, 8)), phases)
    assert got.dtype == jnp.bfloat16
    assert not np.array_equal(got[:, 0], got[:, 1])
