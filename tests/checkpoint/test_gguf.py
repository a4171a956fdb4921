"""GGUF tensors: every type is decoded as the gguf package decodes it, in the right place and shape."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.checkpoint.gguf import GGUFTensors
from jaxinfer.errors import CheckpointError

from .makers import write_gguf

NO_WEIGHTS = ("I8", "I16", "I32", "I64", "Q8_1", "Q8_K")
TYPES = [kind for kind in GGML_QUANT_SIZES if kind.name not in (*NO_WEIGHTS, "F64", "Q1_0")]


def raw_file(path: Path, tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType]]) -> Path:
    """A file of tensors given as bytes, [rows, bytes of a row]."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, (rows, kind) in tensors.items():
        writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_rows(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Bytes below 0x3C, so that every float16 or float32 among them is small and finite."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return np.random.default_rng(0).integers(0, 0x3C, (rows, columns // block * block_bytes), dtype=np.uint8)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_each_type_is_decoded(tmp_path: Path, kind: GGMLQuantizationType):
    rows = random_rows(kind, 3, 512)
    other = np.arange(8, dtype=np.float32)
    path = raw_file(
        tmp_path / "m.gguf", {"a": (other.view(np.uint8)[None], GGMLQuantizationType.F32), "w": (rows, kind)}
    )
    tensors = GGUFTensors(path)
    found = tensors.read("w")
    assert found.shape == tensors.shapes["w"] == (3, 512)
    np.testing.assert_array_equal(found, gguf.dequantize(rows, kind))
    np.testing.assert_array_equal(tensors.read("a")[0], other)


@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_a_type_that_is_no_weight_is_named(tmp_path: Path, name: str):
    kind = GGMLQuantizationType[name]
    path = raw_file(tmp_path / "m.gguf", {"w": (random_rows(kind, 1, 256), kind)})
    with pytest.raises(CheckpointError, match=f"'w' is stored as {name}"):
        GGUFTensors(path).read("w")


def test_one_part_of_a_split_file_is_refused(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"split.count": 3})
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        GGUFTensors(path)


def test_a_file_of_another_kind(tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"<html>404</html>" * 10)
    with pytest.raises(CheckpointError, match="no GGUF file"):
        GGUFTensors(path)
    with pytest.raises(CheckpointError, match=r"none\.gguf cannot be read"):
        GGUFTensors(tmp_path / "none.gguf")
