"""float8 weights: the value of each code times its scale, whatever the layout of scales; anything odd is named."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.checkpoint import tensors as tensors_module
from jaxinfer.checkpoint.fp8 import Fp8Scheme, Fp8Tensors
from jaxinfer.checkpoint.safetensors import SafetensorsDirectory
from jaxinfer.checkpoint.tensors import read_as
from jaxinfer.errors import CheckpointError

E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
RNG = np.random.default_rng(0)
BLOCKS = Fp8Scheme(("_scale_inv", "_scale"), ("block",), (4, 8))
ANY = Fp8Scheme(("_scale",), ("tensor", "channel", "block"), (4, 8))


def scales(*shape: int) -> np.ndarray:
    return RNG.uniform(0.01, 2, shape).astype(np.float32)


def weights(*shape: int, dtype: Any = E4M3) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32).astype(dtype)


def read(directory: Path, stored: dict[str, np.ndarray], scheme: Fp8Scheme = ANY) -> Fp8Tensors:
    save_file(stored, directory / "model.safetensors")
    return Fp8Tensors(SafetensorsDirectory(directory), scheme)


def by_hand(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """weight[..., i, j] * scale[..., i // high, j // wide], one number at a time."""
    values = weight.astype(np.float32)
    for at in np.ndindex(weight.shape):
        values[at] *= scale[(*at[:-2], at[-2] // block[0], at[-1] // block[1])]
    return values


@pytest.mark.parametrize("shape", [(8, 16), (10, 19), (1, 8), (3, 7), (3, 9, 17)])
def test_blocks_and_those_cut_at_the_edge(tmp_path: Path, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    weight, scale = weights(*shape), scales(*shape[:-2], -(-shape[-2] // 4), -(-shape[-1] // 8))
    found = read(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}, BLOCKS)
    assert found.shapes == {"a.weight": shape}
    expected = by_hand(weight, scale, (4, 8))
    np.testing.assert_array_equal(found.read("a.weight"), expected)
    for piece in (1, 40, 10_000):  # pieces of one row, of some, of all
        monkeypatch.setattr(tensors_module, "_PIECE", piece)
        for dtype in (np.float32, ml_dtypes.bfloat16):
            np.testing.assert_array_equal(read_as(found, "a.weight", np.dtype(dtype)), expected.astype(dtype))


@pytest.mark.parametrize("shape", [(), (1,), (6, 1), (6,)])
def test_one_scale_a_tensor_or_a_row(tmp_path: Path, shape: tuple[int, ...]):
    weight, scale = weights(6, 20), scales(*shape)
    found = read(tmp_path, {"a.weight": weight, "a.weight_scale": scale})
    column = np.broadcast_to(scale.reshape(-1, 1), (6, 1))
    np.testing.assert_array_equal(found.read("a.weight"), weight.astype(np.float32) * column)
    np.testing.assert_array_equal(found.read("a.weight", 2, 5), (weight.astype(np.float32) * column)[2:5])


def test_experts_in_one_tensor_have_a_scale_a_row_each(tmp_path: Path):
    weight, scale = weights(3, 5, 4), scales(3, 5, 1)
    found = read(tmp_path, {"experts.up": weight, "experts.up_scale": scale})
    np.testing.assert_array_equal(found.read("experts.up", 1, 3), weight[1:].astype(np.float32) * scale[1:])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_finite_code(tmp_path: Path, dtype: Any):
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    codes = codes[np.isfinite(codes.astype(np.float32))].reshape(1, -1)
    found = read(tmp_path, {"a": codes, "a_scale": np.float32(2.0) * np.ones(1, np.float32)})
    np.testing.assert_array_equal(found.read("a"), 2 * codes.astype(np.float32))
    assert found.read("a").max() == 2 * (448 if dtype is E4M3 else 57_344)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, E8M0])
def test_scales_of_each_type(tmp_path: Path, dtype: Any):
    weight, scale = weights(4, 8), np.array([[0.25]], np.float32)
    found = read(tmp_path, {"a": weight, "a_scale": scale.astype(dtype)})
    np.testing.assert_array_equal(found.read("a"), weight.astype(np.float32) / 4)


def test_what_is_no_float8_is_left_as_it_is(tmp_path: Path):
    norm, head = np.ones(4, np.float32), weights(4, 8, dtype=ml_dtypes.bfloat16)
    found = read(tmp_path, {"norm": norm, "head": head, "a": weights(4, 8), "a_scale": scales(1)})
    np.testing.assert_array_equal(found.read("head"), head)
    assert found.read("head").dtype == head.dtype
    assert set(found.shapes) == {"norm", "head", "a"}


def test_scales_of_activations_and_caches_are_unused(tmp_path: Path):
    names = [f"a.{kind}_scale" for kind in ("input", "output", "activation", "k", "v")]
    found = read(tmp_path, {"a.weight": weights(4, 8), "a.weight_scale": scales(1), **dict.fromkeys(names, scales(1))})
    assert sorted(found.unused) == sorted(names)
    assert set(names) < set(found.shapes)


WEIGHT = weights(10, 19)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"a.weight": WEIGHT}, r"'a.weight' is float8; expected its scale, 'a.weight_scale_inv' or .* found none"),
        (
            {"a.weight": WEIGHT, "a.weight_scale_inv": scales(3, 3), "a.weight_scale": scales(3, 3)},
            "'a.weight' is float8; .* found .'a.weight_scale_inv', 'a.weight_scale'",
        ),
        (
            {"a.weight": WEIGHT, "a.weight_scale_inv": scales(2, 3)},
            r"'a.weight_scale_inv' has shape \(2, 3\); .*\(3, 3\)",
        ),
        ({"a.weight": WEIGHT, "a.weight_scale_inv": scales(3, 3).T[:2].copy()}, r"has shape \(2, 3\)"),
        ({"a.weight": WEIGHT, "a.weight_scale_inv": scales(1)}, r"has shape \(1,\)"),
        (
            {"a.weight": WEIGHT, "a.weight_scale_inv": scales(3, 3).astype(E4M3)},
            "'a.weight_scale_inv' is stored as F8_E4M3",
        ),
        ({"a.weight": WEIGHT, "a.weight_scale_inv": np.ones((3, 3), np.uint8)}, "'a.weight_scale_inv' is stored as U8"),
        ({"a.weight_scale_inv": scales(3, 3)}, "scale 'a.weight_scale_inv' is surplus"),
        ({"a.weight": np.ones((10, 19), np.float32), "a.weight_scale": scales(3, 3)}, "'a.weight_scale' is surplus"),
        ({"a.weight": weights(5), "a.weight_scale": scales(2)}, r"'a.weight_scale' has shape \(2,\)"),
        ({"a": np.ones(3, np.uint8)}, "'a' is stored as U8"),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path: Path, stored: dict[str, np.ndarray], message: str):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, stored, BLOCKS)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [(1,), (4, 1), (1, 1)])
def test_a_scale_that_is_not_finite(tmp_path: Path, shape: tuple[int, ...], value: float):
    scale = np.ones(shape, np.float32)
    scale.flat[-1] = value
    found = read(tmp_path, {"a": weights(4, 8), "a_scale": scale})
    with pytest.raises(CheckpointError, match="'a_scale' holds a value that is not finite"):
        found.read("a")


def test_a_scale_that_makes_a_weight_overflow(tmp_path: Path):
    found = read(tmp_path, {"a": np.full((4, 8), 448, E4M3), "a_scale": np.full(1, 1e38, np.float32)})
    with pytest.raises(CheckpointError, match="'a' holds numbers that are not finite"):
        read_as(found, "a", np.dtype(np.float32))
