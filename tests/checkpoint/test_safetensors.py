"""Safetensors directories: shards, and headers that lie."""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxinfer.checkpoint.safetensors import SafetensorsDirectory
from jaxinfer.errors import CheckpointError

A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(4, np.float32)


def sharded(directory: Path, shards: dict[str, dict[str, np.ndarray]], weight_map: Any = None) -> Path:
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
    if weight_map is None:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def raw_file(directory: Path, header: Any, data: bytes = bytes(24), length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = struct.pack("<Q", len(raw) if length is None else length)
    (directory / "model.safetensors").write_bytes(size + raw + data)
    return directory


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_each_dtype_is_read_as_stored(tmp_path: Path, dtype: Any):
    save_file({"a": A.astype(dtype)}, tmp_path / "model.safetensors")
    tensors = SafetensorsDirectory(tmp_path)
    assert tensors.shapes == {"a": (2, 3)}
    assert tensors.read("a").dtype == dtype
    np.testing.assert_array_equal(tensors.read("a"), A.astype(dtype))


def test_shards_are_one_checkpoint(tmp_path: Path):
    tensors = SafetensorsDirectory(sharded(tmp_path, {"x-1.safetensors": {"a": A}, "x-2.safetensors": {"b": B}}))
    np.testing.assert_array_equal(tensors.read("a"), A)
    np.testing.assert_array_equal(tensors.read("b"), B)


def test_a_tensor_in_two_shards(tmp_path: Path):
    shards = {"x-1.safetensors": {"a": A, "c": B}, "x-2.safetensors": {"a": A, "b": B}}
    with pytest.raises(CheckpointError, match=r"'a' is in two shards, x-1\.safetensors and x-2\.safetensors"):
        SafetensorsDirectory(sharded(tmp_path, shards))


def test_a_missing_shard(tmp_path: Path):
    sharded(tmp_path, {"x-1.safetensors": {"a": A}}, {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    with pytest.raises(CheckpointError, match=r"x-2\.safetensors is missing"):
        SafetensorsDirectory(tmp_path)


def test_no_weights_at_all(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        ({"a": "x-1.safetensors", "c": "x-1.safetensors"}, "'c' should be in x-1.safetensors"),
        ({"a": "x-1.safetensors", "b": "x-1.safetensors", "z": "x-2.safetensors"}, "'b' should be in x-1"),
        ({"a": "x-1.safetensors", "z": "x-2.safetensors"}, "'b' is in x-2.safetensors but not in"),
    ],
)
def test_an_index_that_disagrees_with_its_shards(tmp_path: Path, weight_map: dict[str, str], match: str):
    shards = {"x-1.safetensors": {"a": A}, "x-2.safetensors": {"b": B, "z": B}}
    with pytest.raises(CheckpointError, match=match):
        SafetensorsDirectory(sharded(tmp_path, shards, weight_map))


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", ".", "", "a\\b", "x\0", 7, None]
)
def test_a_shard_outside_the_directory(tmp_path: Path, shard: Any):
    (tmp_path / "model").mkdir()
    save_file({"a": A}, tmp_path / "x.safetensors")
    sharded(tmp_path / "model", {}, {"a": shard})
    with pytest.raises(CheckpointError, match="expected a plain file name"):
        SafetensorsDirectory(tmp_path / "model")


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000, "\xff"])
def test_a_damaged_index(tmp_path: Path, index: str):
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="latin-1")
    with pytest.raises(CheckpointError, match="index"):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize("dtype", ["F64", "I32", "I8", "BOOL"])
def test_a_dtype_that_is_no_weight(tmp_path: Path, dtype: str):
    size = {"F64": 8, "I32": 4}.get(dtype, 1)
    header = {"a": {"dtype": dtype, "shape": [3], "data_offsets": [0, 3 * size]}}
    with pytest.raises(CheckpointError, match=f"'a' is stored as {dtype}"):
        SafetensorsDirectory(raw_file(tmp_path, header, bytes(3 * size)))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]},
        {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]},
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [24, 0]},
        {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2**32, 2**32, 2**32], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [2**70], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [6], "data_offsets": [0, 2**64 - 1]},
        {"dtype": "X", "shape": [6], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": 6},
        None,
    ],
)
def test_a_header_that_lies(tmp_path: Path, entry: Any):
    with pytest.raises(CheckpointError, match="damaged"):
        SafetensorsDirectory(raw_file(tmp_path, {"a": entry}))


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_a_header_length_that_lies(tmp_path: Path, length: int):
    with pytest.raises(CheckpointError, match="damaged"):
        SafetensorsDirectory(raw_file(tmp_path, {}, length=length))


def test_tensors_that_share_bytes(tmp_path: Path):
    entry = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}
    with pytest.raises(CheckpointError, match="damaged"):
        SafetensorsDirectory(raw_file(tmp_path, {"a": entry, "b": entry}))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    directory = tmp_path_factory.mktemp("fuzz")
    save_file({"a": A, "b": B}, directory / "model.safetensors")
    return directory, (directory / "model.safetensors").read_bytes()


@given(data=st.data())
def test_any_bytes_overwritten(sound: tuple[Path, bytes], data: st.DataObject):
    directory, raw = sound
    patch = data.draw(st.binary(min_size=1, max_size=12) | st.sampled_from([b"-1", b"9" * 20, b"[" * 9, b'"b":']))
    at = data.draw(st.integers(0, len(raw) - len(patch)))
    (directory / "model.safetensors").write_bytes(raw[:at] + patch + raw[at + len(patch) :])
    try:
        tensors = SafetensorsDirectory(directory)
        for name, shape in tensors.shapes.items():
            assert tensors.read(name).shape == shape
    except CheckpointError:
        return


@given(data=st.data())
def test_any_cut(sound: tuple[Path, bytes], data: st.DataObject):
    directory, raw = sound
    (directory / "model.safetensors").write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(CheckpointError, match="damaged"):
        SafetensorsDirectory(directory)
