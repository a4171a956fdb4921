"""Norm and softcap against their definitions."""

import jax.numpy as jnp
import numpy as np

from jaxinfer.model.layers import rms_norm, softcap

from . import numpy_decoder


def test_rms_norm_is_its_definition_in_float32() -> None:
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    weight = np.linspace(0.5, 2, 16, dtype=np.float32)
    np.testing.assert_allclose(
        rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-5), numpy_decoder.norm(x, weight, 1e-5), rtol=1e-5
    )
    tiny = jnp.full((1, 4), 300.0, jnp.float16)  # 300 squared overflows float16
    np.testing.assert_allclose(rms_norm(tiny, jnp.ones(4), 1e-5), 1.0)


def test_softcap_bounds_and_leaves_alone() -> None:
    x = jnp.array([-1e4, 0.01, 1e4])
    np.testing.assert_allclose(softcap(x, 30.0), [-30.0, 0.01, 30.0], rtol=1e-6)
    assert softcap(x, None) is x
