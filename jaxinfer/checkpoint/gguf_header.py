"""The header of a GGUF file: metadata as plain Python values, and where each tensor's bytes lie.

Knows: the container format (github.com/ggml-org/ggml, docs/gguf.md; versions 2 and 3, little-endian). Knows nothing of
models, and decodes no tensor.

The file is hostile input. Every count, length, product and offset is a Python integer (no 64-bit wrap-around) and is
compared with the bytes that are left before anything of that size is made, so no header can ask for more memory than a
small multiple of its own file. `gguf.GGUFReader` is not used: it trusts those numbers, and takes 7 s for a vocabulary
of 49,152 tokens that this takes 0.1 s for.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_ALIGNMENT = 2**16
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MIN_FIELD_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` outermost axis first (the file stores it reversed); `start`, `size`: bytes of the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Header:
    """Everything a GGUF file says before its tensors' bytes."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


class _Cursor:
    """Reads forward through the file and never past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int, what: str) -> bytes:
        left = len(self.data) - self.at
        if size > left:
            raise CheckpointError(f"GGUF {what} wants {size} bytes, but {left} are left; the file is cut or damaged")
        self.at += size
        return self.data[self.at - size : self.at]

    def u32(self, what: str) -> int:
        return struct.unpack("<I", self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return struct.unpack("<Q", self.take(8, what))[0]

    def count(self, what: str, item_bytes: int) -> int:
        """A count of things that take `item_bytes` or more each, refused where the file cannot hold them."""
        number, left = self.u64(what), len(self.data) - self.at
        if number * item_bytes > left:
            raise CheckpointError(f"GGUF {what} is {number}, but {left} bytes are left; the file is cut or damaged")
        return number

    def string(self, what: str) -> str:
        raw = self.take(self.u64(what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"GGUF {what} is no UTF-8 text: {raw[:40]!r}") from error


def read_header(path: Path) -> Header:
    """The header of the GGUF file at `path`; raises CheckpointError for anything the format does not allow."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data))
    except CheckpointError as error:
        raise CheckpointError(f"{path.name}: {error}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read as a GGUF file: {error}") from error


def _parse(cursor: _Cursor) -> Header:
    magic = cursor.take(4, "magic")
    if magic != _MAGIC:
        raise CheckpointError(f"this is no GGUF file: it begins with {magic!r}, expected {_MAGIC!r}")
    version = cursor.u32("version")
    if version not in _VERSIONS:
        raise CheckpointError(f"GGUF version is {version}; expected 2 or 3, little-endian")
    tensor_count = cursor.count("tensor count", _MIN_TENSOR_BYTES)
    field_count = cursor.count("field count", _MIN_FIELD_BYTES)
    fields = _read_fields(cursor, field_count)
    return Header(fields, _read_tensors(cursor, tensor_count, _alignment(fields)))


def _read_fields(cursor: _Cursor, count: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for _ in range(count):
        name = cursor.string("field name")
        if name in fields:
            raise CheckpointError(f"GGUF field {name!r} is there twice")
        fields[name] = _read_value(cursor, cursor.u32(name), name)
    return fields


def _read_value(cursor: _Cursor, kind: int, name: str) -> Any:
    if kind == _STRING:
        return cursor.string(name)
    if kind == _ARRAY:
        return _read_array(cursor, name)
    return _read_numbers(cursor, kind, 1, name)[0]


def _read_array(cursor: _Cursor, name: str) -> list[Any]:
    kind = cursor.u32(name)
    if kind == _STRING:
        return [cursor.string(name) for _ in range(cursor.count(f"{name} length", 8))]
    return _read_numbers(cursor, kind, cursor.count(f"{name} length", 1), name)


def _read_numbers(cursor: _Cursor, kind: int, count: int, name: str) -> list[Any]:
    if kind not in _SCALARS:
        raise CheckpointError(f"GGUF field {name!r} has type {kind}; expected a scalar, a string, or an array of those")
    dtype = np.dtype(_SCALARS[kind])
    return np.frombuffer(cursor.take(count * dtype.itemsize, name), dtype).tolist()


def _alignment(fields: Mapping[str, Any]) -> int:
    value = fields.get("general.alignment", 32)
    if not isinstance(value, int) or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
        raise CheckpointError(f"general.alignment is {value!r}; expected a power of two up to {_MAX_ALIGNMENT}")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    relative: dict[str, TensorInfo] = {}
    for _ in range(count):
        info = _read_tensor(cursor)
        if info.name in relative:
            raise CheckpointError(f"tensor {info.name!r} is there twice")
        if info.start % alignment:
            raise CheckpointError(f"tensor {info.name!r} starts at {info.start}, no multiple of {alignment}")
        relative[info.name] = info
    base = -(-cursor.at // alignment) * alignment
    placed = {t.name: TensorInfo(t.name, t.shape, t.kind, base + t.start, t.size) for t in relative.values()}
    _check_places(placed, len(cursor.data))
    return placed


def _read_tensor(cursor: _Cursor) -> TensorInfo:
    name = cursor.string("tensor name")
    axes = cursor.u32(f"{name} axes")
    if not 1 <= axes <= _MAX_DIMS:
        raise CheckpointError(f"tensor {name!r} has {axes} axes; expected 1 to {_MAX_DIMS}")
    dims = struct.unpack(f"<{axes}Q", cursor.take(8 * axes, f"{name} shape"))
    kind = _tensor_kind(cursor.u32(f"{name} type"), name)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in dims or dims[0] % block:
        raise CheckpointError(
            f"tensor {name!r} has shape {dims[::-1]}; {kind.name} needs rows of a multiple of {block}"
        )
    return TensorInfo(name, dims[::-1], kind, cursor.u64(f"{name} offset"), prod(dims) // block * block_bytes)


def _tensor_kind(value: int, name: str) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(value)
    except ValueError as error:
        raise CheckpointError(f"tensor {name!r} has type {value}, which the gguf package does not know") from error


def _check_places(tensors: Mapping[str, TensorInfo], file_bytes: int) -> None:
    """Every tensor lies inside the file and none overlaps another."""
    end, before = 0, ""
    for info in sorted(tensors.values(), key=lambda info: info.start):
        if info.start + info.size > file_bytes:
            raise CheckpointError(
                f"tensor {info.name!r} needs bytes {info.start} to {info.start + info.size}, but the file has "
                f"{file_bytes}; it is cut or damaged"
            )
        if info.start < end:
            raise CheckpointError(f"tensors {before!r} and {info.name!r} share bytes of the file")
        end, before = info.start + info.size, info.name
