"""int8 keys and values: how far off they may be, and what has no scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pages import as_float32, empty_pages, page_shape, quantise

as_read = jax.jit(lambda x: as_float32(quantise(x)))


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 3e4, 1e30])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_number_is_off_by_more_than_half_its_scale(size: float, dtype: jnp.dtype) -> None:
    x = jnp.asarray(size * np.random.default_rng(0).standard_t(2, (50, 3, 64)), dtype).astype(jnp.float32)
    _, scales = jax.jit(quantise)(x)
    np.testing.assert_allclose(scales, np.abs(x).max(axis=-1) / 127, rtol=1e-6)
    assert (np.abs(as_read(x) - x) <= 0.5001 * np.asarray(scales)[..., None]).all()


def test_the_largest_number_is_kept_and_a_sign_changes_nothing_else() -> None:
    x = np.random.default_rng(1).standard_normal((100, 16)).astype(np.float32)
    numbers, _ = jax.jit(quantise)(x)
    assert (np.abs(numbers).max(axis=-1) == 127).all()
    np.testing.assert_array_equal(as_read(-x), -as_read(x))


def test_zeros_stay_zeros() -> None:
    x = np.zeros((2, 4), np.float32)
    np.testing.assert_array_equal(as_read(x), x)
    assert not jax.jit(quantise)(x).scales.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_become_a_number(bad: float) -> None:
    """Else a broken row would go unnoticed."""
    x = np.ones((130, 3, 64), np.float32)
    x[1:, 0, 5] = bad
    x[7, 0] = bad
    x[9, 0, 1:] = bad
    read = np.asarray(as_read(x))
    assert not np.isfinite(read[1:, 0]).any()
    np.testing.assert_allclose(read[:, 1:], 1.0, rtol=1e-6)
    np.testing.assert_allclose(read[0], 1.0, rtol=1e-6)


def test_an_int8_pool_has_a_scale_per_head_and_token() -> None:
    shape = (5, 2, 3, 8, 16)
    pages = empty_pages(shape, "int8")
    assert (pages.numbers.shape, pages.scales.shape) == (shape, shape[:-1])
    assert page_shape(pages) == page_shape(empty_pages(shape, "bfloat16")) == shape
