"""Rotary phases against complex numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import RopeConfig
from jaxinfer.model.rope import rope_phases, rotate

from . import numpy_decoder

ROPES = {
    "default": RopeConfig(theta=1e5),
    "gemma3 local": RopeConfig(theta=1e4),
    "linear": RopeConfig(theta=1e6, kind="linear", factor=8.0),
    "llama3": RopeConfig(theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("position", [0, 1, 8191, 8192, 4 * 8192])
def test_rope_turns_each_pair_as_a_complex_number(name: str, position: int) -> None:
    """At 4 x 8192 float32 holds a phase to 0.002 radians; a phase in bfloat16 would be off by whole turns."""
    x = np.random.default_rng(0).standard_normal(64)
    phases = rope_phases(ROPES[name], 64, jnp.full((1, 1), position, jnp.int32), 2**17)
    got = rotate(jnp.asarray(x, jnp.float32)[None, None, None], phases)[0, 0, 0]
    np.testing.assert_allclose(got, numpy_decoder.turn(x, position, ROPES[name]), atol=6e-3 if position > 1 else 1e-6)


def test_llama3_keeps_high_frequencies_and_divides_low_ones() -> None:
    stretched = ROPES["llama3"]
    waves = numpy_decoder.wavelengths(RopeConfig(theta=stretched.theta), 64)
    ratios = np.array(numpy_decoder.wavelengths(stretched, 64)) / waves
    assert ratios[0] == 1  # the second decoder's own reading, pinned so that it cannot drift with the model's
    assert ratios[-1] == stretched.factor
    assert (np.diff(ratios) >= 0).all()


def test_rope_keeps_products_of_equal_distance_equal() -> None:
    """q at i + 100 against k at j + 100 scores as q at i against k at j."""
    random = np.random.default_rng(0)
    q, k = (jnp.asarray(random.standard_normal((1, 1, 1, 32)), jnp.float32) for _ in "qk")

    def score(i: int, j: int) -> float:
        turned = [
            rotate(x, rope_phases(ROPES["default"], 32, jnp.full((1, 1), at), 2**17)) for x, at in ((q, i), (k, j))
        ]
        return float(jnp.vdot(*turned))

    assert score(107, 103) == pytest.approx(score(7, 3), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)


def test_rope_of_bfloat16_is_computed_in_float32() -> None:
    """bfloat16 rounds 257 to 256: one position would read as another."""
    x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    turned = [rotate(x, rope_phases(RopeConfig(), 8, jnp.full((1, 1), at), 2**17)) for at in (256, 257)]
    assert turned[0].dtype == jnp.bfloat16
    assert not np.array_equal(*turned)
