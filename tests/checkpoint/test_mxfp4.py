"""MXFP4: nibbles and scales mean what the OCP format says, and the tensor is the one that plain checkpoints have."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.checkpoint import tensors as tensors_module
from jaxinfer.checkpoint.mxfp4 import Mxfp4Tensors
from jaxinfer.checkpoint.safetensors import SafetensorsDirectory
from jaxinfer.checkpoint.tensors import read_as
from jaxinfer.errors import CheckpointError

RNG = np.random.default_rng(0)


def read(directory: Path, stored: dict[str, np.ndarray]) -> Mxfp4Tensors:
    save_file(stored, directory / "model.safetensors")
    return Mxfp4Tensors(SafetensorsDirectory(directory))


def by_hand(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[..., out, g, 16] and [..., out, g] to [..., 32g, out], by ml_dtypes' own two types."""
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32).reshape(*scales.shape, 32)
    values = values * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
    return np.swapaxes(values.reshape(*scales.shape[:-1], -1), -1, -2)


@pytest.mark.parametrize("lead", [(3,), (), (2, 2)])
def test_blocks_are_decoded_and_turned(tmp_path: Path, lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    blocks = RNG.integers(0, 256, (*lead, 6, 2, 16), np.uint8)
    scales = RNG.integers(90, 160, (*lead, 6, 2), np.uint8)
    bias = np.ones((3, 6), np.float32)
    found = read(tmp_path, {"e.up_blocks": blocks, "e.up_scales": scales, "e.up_bias": bias})
    assert found.shapes == {"e.up": (*lead, 64, 6), "e.up_bias": (3, 6)}
    expected = by_hand(blocks, scales)
    np.testing.assert_array_equal(found.read("e.up"), expected)
    np.testing.assert_array_equal(found.read("e.up", 1, 2), expected[1:2])
    np.testing.assert_array_equal(found.read("e.up_bias"), bias)
    for piece in (1, 500):
        monkeypatch.setattr(tensors_module, "_PIECE", piece)
        for dtype in (np.float32, ml_dtypes.bfloat16):
            np.testing.assert_array_equal(read_as(found, "e.up", np.dtype(dtype)), expected.astype(dtype))


def test_every_byte_under_every_scale(tmp_path: Path):
    """From 2**-127, under which values are subnormal in float32, to the largest that float32 holds six times."""
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (252, 1, 1))
    scales = np.repeat(np.arange(252, dtype=np.uint8)[:, None], 16, axis=1)
    found = read(tmp_path, {"w_blocks": blocks, "w_scales": scales}).read("w")
    np.testing.assert_array_equal(found, by_hand(blocks, scales))


def test_the_low_half_comes_first(tmp_path: Path):
    """0x2 is 1.0 and 0xF is -6.0; scale 128 doubles."""
    blocks = np.full((1, 1, 16), 0xF2, np.uint8)
    found = read(tmp_path, {"w_blocks": blocks, "w_scales": np.full((1, 1), 128, np.uint8)}).read("w")
    np.testing.assert_array_equal(found[:, 0], [2.0, -12.0] * 16)


def test_a_decoded_tensor_lies_output_first(tmp_path: Path):
    """So that the leaf, which is output-first, is made of it without a copy."""
    stored = {"w_blocks": np.zeros((2, 6, 1, 16), np.uint8), "w_scales": np.zeros((2, 6, 1), np.uint8)}
    found = read_as(read(tmp_path, stored), "w", np.dtype(np.float32))
    assert found.shape == (2, 32, 6)
    assert np.swapaxes(found, 1, 2).flags.c_contiguous


BLOCKS, SCALES = np.zeros((2, 6, 1, 16), np.uint8), np.zeros((2, 6, 1), np.uint8)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"w_blocks": BLOCKS}, r"scale 'w_scales' is missing; expected \(2, 6, 1\) beside 'w_blocks'"),
        ({"w_scales": SCALES}, "'w_scales' is stored as U8, but is no mxfp4 block"),
        ({"w_blocks": BLOCKS, "w_scales": SCALES[:1]}, r"'w_scales' has shape \(1, 6, 1\); expected \(2, 6, 1\)"),
        ({"w_blocks": BLOCKS, "w_scales": SCALES.astype(np.float32)}, "'w_scales' is stored as F32; expected U8"),
        ({"w_blocks": BLOCKS[..., :8].copy(), "w_scales": SCALES}, r"'w_blocks' has shape \(2, 6, 1, 8\)"),
        ({"w_blocks": BLOCKS[0, 0], "w_scales": SCALES[0, 0]}, r"'w_blocks' has shape \(1, 16\)"),
        ({"w_blocks": BLOCKS, "w_scales": SCALES, "w": np.ones((2, 32, 6), np.float32)}, "'w' is there twice"),
        ({"w": np.ones(3, np.uint8)}, "'w' is stored as U8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, stored: dict[str, np.ndarray], message: str):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, stored)


def test_a_scale_that_is_no_number(tmp_path: Path):
    found = read(tmp_path, {"w_blocks": BLOCKS, "w_scales": np.full_like(SCALES, 255)})
    with pytest.raises(CheckpointError, match="'w_scales' holds 255"):
        found.read("w")


def test_a_scale_that_makes_a_weight_overflow(tmp_path: Path):
    found = read(tmp_path, {"w_blocks": BLOCKS + np.uint8(7), "w_scales": np.full_like(SCALES, 254)})
    with pytest.raises(CheckpointError, match="'w' holds numbers that are not finite"):
        read_as(found, "w", np.dtype(np.float32))
