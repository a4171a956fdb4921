"""Hugging Face weight files: `model.safetensors`, or shards listed by `model.safetensors.index.json`.

Knows: where tensors lie, and how their bytes become an array. The `safetensors` package checks each header (sizes,
offsets, that every byte belongs to one tensor) against its file before a byte of weights is read; the bytes are then
read, not mapped, so that no page of an earlier tensor stays in memory. What a name means is `families`'.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from jaxinfer.checkpoint.tensors import read_bytes
from jaxinfer.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype(np.uint8),
}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor: the file it is in, its type as the format spells it, its shape, and its first byte in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


class SafetensorsDirectory:
    """The tensors of a directory, read one or some rows at a time as they are stored.

    `shapes` and `dtypes` are by name; a dtype is one of F32, F16, BF16, F8_E4M3, F8_E5M2, F8_E8M0, U8.
    A file may be a link to anywhere, as the hub's cache is made of: who may place a link may as well place the file.
    Raises CheckpointError for a damaged, missing or escaping shard, a tensor in two shards or in none, a type that is
    neither a weight's nor a part of a quantised weight's.
    """

    def __init__(self, directory: Path) -> None:
        self._tensors: dict[str, Stored] = {}
        listed = _listed(directory)
        for shard in sorted(set(listed.values())) if listed is not None else [_SINGLE]:
            for name, stored in _read_shard(directory / shard).items():
                if name in self._tensors:
                    raise CheckpointError(
                        f"tensor {name!r} is in two shards, {self._tensors[name].path.name} and {shard}"
                    )
                self._tensors[name] = stored
        if listed is not None:
            _check_listed(listed, self._tensors)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: stored.shape for name, stored in self._tensors.items()}
        self.dtypes: Mapping[str, str] = {name: stored.dtype for name, stored in self._tensors.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Shaped[np.ndarray, "..."]:
        """The tensor `name`, or its rows `start` to `stop`, as stored; float8 as float32, which holds each of them."""
        stored = self._tensors[name]
        shape, dtype = stored.shape, _DTYPES[stored.dtype]
        if shape:
            start, stop, _ = slice(start, stop).indices(shape[0])
            shape = (max(0, stop - start), *shape[1:])
        out = np.empty(shape, dtype)
        read_bytes(stored.path, stored.start + start * prod(shape[1:]) * dtype.itemsize, out)
        return out.astype(np.float32) if stored.dtype.startswith("F8") else out


def _read_shard(path: Path) -> dict[str, Stored]:
    """The tensors of one file. The package has checked that they follow each other without a gap, to the file's end."""
    if not path.is_file():
        raise CheckpointError(f"weight file {path.name} is missing; other kinds, such as pickled .bin, are not read")
    try:
        with path.open("rb") as head, safe_open(str(path), framework="np") as file:
            at = 8 + struct.unpack("<Q", head.read(8))[0]
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"weight file {path.name} is damaged: {error}") from error
    tensors = {}
    for name, (dtype, shape) in found.items():
        if dtype not in _DTYPES:
            raise CheckpointError(f"tensor {name!r} is stored as {dtype}; expected one of {', '.join(_DTYPES)}")
        tensors[name] = Stored(path, dtype, shape, at)
        at += prod(shape) * _DTYPES[dtype].itemsize
    return tensors


def _listed(directory: Path) -> dict[str, str] | None:
    """Tensor name to shard file name, as the index says; None where there is no index."""
    path = directory / _INDEX
    if not path.is_file():
        return None
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{_INDEX} is damaged: {error!r}") from error
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{_INDEX} holds a weight_map of type {type(listed).__name__}; expected names to files")
    for shard in listed.values():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", "..") or set(shard) & {"\\", "\0"}:
            raise CheckpointError(f"{_INDEX} names shard {shard!r}; expected a plain file name in the same directory")
    return listed


def _check_listed(listed: Mapping[str, str], tensors: Mapping[str, Stored]) -> None:
    """The index and the shards agree on which file holds which tensor."""
    for name, shard in listed.items():
        found = tensors[name].path.name if name in tensors else "no shard"
        if found != shard:
            raise CheckpointError(f"tensor {name!r} should be in {shard} by {_INDEX}, but is in {found}")
    if surplus := sorted(set(tensors) - set(listed)):
        raise CheckpointError(f"tensor {surplus[0]!r} is in {tensors[surplus[0]].path.name} but not in {_INDEX}")
