"""Plain weights made into whole numbers: how far they may move, and in which shape they come."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.checkpoint import quantise as module
from jaxinfer.checkpoint.quantise import quantise
from jaxinfer.errors import CheckpointError
from jaxinfer.model import quantised

pytestmark = pytest.mark.usefixtures("narrow_matrices_in_int4")

QKV, OUT, TABLE = ("block_0", "attention", "qkv"), ("block_0", "attention", "out"), ("embedding",)
RNG = np.random.default_rng(5)


def decoded(leaf: Any) -> np.ndarray:
    return np.asarray(leaf.dequantise(), np.float32)


@pytest.mark.parametrize(("path", "shape"), [(QKV, (2, 3, 8, 96)), (OUT, (10, 2, 3, 64))])
def test_int8_moves_no_weight_by_more_than_half_a_step_of_its_channel(path: Any, shape: tuple[int, ...]):
    weight = RNG.normal(size=shape).astype(np.float32)
    leaf = quantise(path, weight, "int8")
    assert (leaf.values.dtype, leaf.values.shape, leaf.offset) == (np.int8, shape, None)
    step = np.broadcast_to(leaf.scale, shape)
    assert np.all(np.abs(decoded(leaf) - weight) <= 0.501 * step)
    axes = (1, 2, 3) if path == OUT else (3,)
    np.testing.assert_allclose(leaf.scale, np.abs(weight).max(axis=axes, keepdims=True) / 127, rtol=1e-6)
    assert np.abs(leaf.values).max() == 127


def test_embedding_and_head_stay_int8_in_int4():
    leaf = quantise(TABLE, RNG.normal(size=(9, 64)).astype(np.float32), "int4")
    assert (leaf.values.dtype, leaf.scale.shape, leaf.offset) == (np.int8, (9, 1), None)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_named(kind: Any, bad: float):
    weight = np.ones((4, 64), np.float32)
    weight[2, 5] = bad
    with pytest.raises(CheckpointError, match=r"block_0/mlp/down holds numbers that are not finite"):
        quantise(("block_0", "mlp", "down"), weight, kind)


def test_narrow_matrices_stay_int8_in_int4(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantised, "NARROW", 64)
    down, out = ("block_0", "mlp", "down"), ("block_0", "attention", "out")
    kinds = [
        quantise(path, np.ones(shape, np.float32), "int4").values.dtype
        for path, shape in ((down, (4, 32)), (down, (4, 64)), (out, (8, 2, 2, 8)), (out, (8, 2, 2, 16)))
    ]
    assert kinds == [np.int8, jnp.int4, np.int8, jnp.int4]


def test_int4_fits_its_groups_better_than_their_ends_do():
    """By a tenth of the error at least, on normal weights; and never worse in any group."""
    weight = RNG.normal(size=(64, 128)).astype(np.float32)
    groups = weight.reshape(-1, 32)
    low, step = groups.min(axis=1, keepdims=True), np.ptp(groups, axis=1, keepdims=True) / 15
    by_ends = np.rint((groups - low) / step) * step + low
    fitted = decoded(quantise(("block_0", "mlp", "down"), weight, "int4")).reshape(-1, 32)
    ours, theirs = (((found - groups) ** 2).sum(axis=1) for found in (fitted, by_ends))
    assert ours.sum() < 0.9 * theirs.sum()
    assert np.all(ours <= theirs * 1.001)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_group_of_one_number_is_exact(kind: Any):
    for number in (0.0, 0.37, -2.5):
        weight = np.full((4, 64), number, np.float32)
        leaf = quantise(("block_0", "mlp", "down"), weight, kind)
        np.testing.assert_allclose(decoded(leaf), weight, rtol=1e-6)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_pieces_change_nothing(kind: Any, monkeypatch: pytest.MonkeyPatch):
    weight = RNG.normal(size=(2, 3, 8, 96)).astype(np.float32)
    whole = quantise(QKV, weight, kind)
    monkeypatch.setattr(module, "_PIECE", 200)
    parts = quantise(QKV, weight, kind)
    for name in ("values", "scale", "offset"):
        one, other = (getattr(leaf, name) for leaf in (whole, parts))
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, other)


def test_bfloat16_weights_keep_small_scales_in_bfloat16():
    weight = RNG.normal(size=(16, 64)).astype(ml_dtypes.bfloat16)
    leaf = quantise(("block_0", "mlp", "down"), weight, "int4")
    assert (leaf.scale.dtype, leaf.offset.dtype, leaf.dtype) == (jnp.bfloat16, jnp.bfloat16, "bfloat16")
    assert quantise(QKV, weight[None, None], "int8").scale.dtype == np.float32
    step = np.repeat(leaf.scale.astype(np.float32), 32, axis=1)
    assert np.all(np.abs(decoded(leaf) - weight.astype(np.float32)) <= 0.6 * step + 0.02)
