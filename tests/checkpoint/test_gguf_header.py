"""GGUF headers are hostile input: whatever they say, a CheckpointError, and no more memory than the file's size."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.checkpoint.gguf import GGUFTensors
from jaxinfer.checkpoint.gguf_header import read_header
from jaxinfer.errors import CheckpointError

from .makers import write_gguf

HUGE = (2**31, 2**32 + 5, 2**61, 2**63, 2**64 - 1)
STRING, ARRAY, U32 = 8, 9, 4


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(fields: list[bytes] = [], tensors: list[bytes] = [], *, version: int = 3, data: bytes = b"") -> bytes:  # noqa: B006
    """A GGUF file of parts that are right or wrong as the test likes; `data` begins at the next multiple of 32."""
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join(fields) + b"".join(tensors)
    return start + bytes(-len(start) % 32) + data


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def refused(tmp_path: Path, raw: bytes, match: str) -> None:
    """The file is refused with a message that says so, and the refusal costs no more memory than the file's size."""
    path = tmp_path / "hostile.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=match) as refusal:
        read_header(path)
    assert "hostile.gguf" in str(refusal.value)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 500_000 + 20 * len(raw)


def test_a_sound_header_is_read(tmp_path: Path):
    path = tmp_path / "sound.gguf"
    fields = [
        field("a", U32, struct.pack("<I", 7)),
        field("b", STRING, text("é")),
        field("c", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("")),
        field("d", ARRAY, struct.pack("<IQ3f", 6, 3, 1.0, 2.0, 0.5)),
        field("e", 7, b"\1"),
    ]
    path.write_bytes(header(fields, [tensor("w", (2, 3)), tensor("n", (4,), 0, 32)], data=bytes(48)))
    found = read_header(path)
    assert found.fields == {"a": 7, "b": "é", "c": ["x", ""], "d": [1.0, 2.0, 0.5], "e": True}
    assert [(t.shape, t.size) for t in found.tensors.values()] == [((3, 2), 24), ((4,), 16)]
    assert found.tensors["n"].start - found.tensors["w"].start == 32


@pytest.mark.parametrize("raw", [b"", b"GG", b"GGUF", b"GGUF\3\0\0\0", header()[:20]])
def test_a_file_cut_in_its_first_bytes(tmp_path: Path, raw: bytes):
    refused(tmp_path, raw, "cut or damaged|cannot be read")


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_an_unknown_version_or_byte_order(tmp_path: Path, version: int):
    refused(tmp_path, header(version=version), "version")


def test_another_kind_of_file(tmp_path: Path):
    refused(tmp_path, b"PK\3\4" + bytes(100), "no GGUF file")


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("where", ["tensors", "fields"])
def test_a_huge_count(tmp_path: Path, count: int, where: str):
    counts = (count, 0) if where == "tensors" else (0, count)
    refused(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(64), "count")


@pytest.mark.parametrize("length", HUGE)
def test_a_huge_string_or_array(tmp_path: Path, length: int):
    size = struct.pack("<Q", length)
    refused(tmp_path, header([size + b"name" + bytes(30)]), "field name wants")
    refused(tmp_path, header([field("a", STRING, size)]), "a wants")
    for kind in (0, STRING, 12):
        refused(tmp_path, header([field("a", ARRAY, struct.pack("<I", kind) + size)]), "a length|a wants")


@pytest.mark.parametrize("kind", [ARRAY, 13, 2**32 - 1])
def test_an_array_of_arrays_or_of_an_unknown_type(tmp_path: Path, kind: int):
    refused(tmp_path, header([field("a", ARRAY, struct.pack("<IQ", kind, 1) + bytes(64))]), "type")


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        (tensor("w", (2,) * 5), "5 axes"),
        (tensor("w", ()), "0 axes"),
        (tensor("w", (0, 4)), "shape"),
        (tensor("w", (4,), kind=999), "type 999"),
        (tensor("w", (31, 2), kind=2), "multiple of 32"),
        (tensor("w", (4,), offset=8), "no multiple of 32"),
        (tensor("w", (4,), offset=2**63), "the file has"),
        (tensor("w", (2**40,)), "the file has"),
        (tensor("w", (2**32, 2**32, 2**32)), "the file has"),
        (tensor("w", (2**62, 4)), "the file has"),
        (text("\xff").replace("\xff".encode(), b"\xff\xff"), "UTF-8"),
    ],
)
def test_a_tensor_that_cannot_be(tmp_path: Path, parts: bytes, match: str):
    """Products such as 2**62 * 4 would be 0 in 64 bits."""
    refused(tmp_path, header([], [parts], data=bytes(64)), match)


def test_names_that_are_there_twice(tmp_path: Path):
    refused(tmp_path, header([field("a", U32, bytes(4))] * 2), "twice")
    refused(tmp_path, header([], [tensor("w", (4,)), tensor("w", (4,), offset=32)], data=bytes(64)), "twice")


def test_tensors_that_share_bytes(tmp_path: Path):
    refused(tmp_path, header([], [tensor("v", (16,)), tensor("w", (4,), offset=32)], data=bytes(64)), "share bytes")


@pytest.mark.parametrize("value", [0, 3, 2**31])
def test_an_alignment_that_is_no_power_of_two(tmp_path: Path, value: int):
    refused(tmp_path, header([field("general.alignment", U32, struct.pack("<I", value))]), "alignment")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    q8 = (np.ones((4, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    fields = {"a": 7, "b": "text", "c": ["x", "yy"], "d": [1, 2, 3], "e": 0.5}
    raw = write_gguf(path, "llama", {"w": np.ones((2, 3), np.float32), "q": q8}, fields).read_bytes()
    return path, raw


def assert_refused_or_sound(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    try:
        tensors = GGUFTensors(path)
        for name, shape in tensors.shapes.items():
            assert tensors.read(name).shape == shape
    except CheckpointError:
        return


@given(data=st.data())
def test_any_bytes_overwritten(sound: tuple[Path, bytes], data: st.DataObject):
    path, raw = sound
    patch = data.draw(st.binary(min_size=1, max_size=12) | st.sampled_from(HUGE).map(lambda n: struct.pack("<Q", n)))
    at = data.draw(st.integers(0, len(raw) - len(patch)))
    assert_refused_or_sound(path, raw[:at] + patch + raw[at + len(patch) :])


@given(data=st.data())
def test_any_cut(sound: tuple[Path, bytes], data: st.DataObject):
    path, raw = sound
    path.write_bytes(raw)
    end = max(info.start + info.size for info in read_header(path).tensors.values())
    cut = data.draw(st.integers(0, end - 1))
    path.write_bytes(raw[:cut])
    with pytest.raises(CheckpointError):
        GGUFTensors(path).read("q")


@given(st.binary(max_size=200))
def test_any_bytes_after_the_magic(tmp_path_factory: pytest.TempPathFactory, raw: bytes):
    assert_refused_or_sound(tmp_path_factory.getbasetemp() / "any.gguf", b"GGUF\3\0\0\0" + raw)
