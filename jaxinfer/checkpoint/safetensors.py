"""Hugging Face weight files: `model.safetensors`, or shards listed by `model.safetensors.index.json`.

Knows: where tensors lie. The `safetensors` package checks each header (sizes, offsets, full cover) against its file
before it reads a byte of weights. What a name means is `families`'.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxinfer.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")


class SafetensorsDirectory:
    """The tensors of a directory, read one at a time in the dtype they are stored in.

    Raises CheckpointError for a damaged, missing or escaping shard, a tensor in two shards or in none, a dtype other
    than float32, bfloat16 or float16.
    """

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        listed = _listed(directory)
        for shard in sorted(set(listed.values())) if listed is not None else [_SINGLE]:
            self._add_shard(directory / shard)
        if listed is not None:
            _check_listed(listed, self._files)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor by name."""
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        """The tensor `name`."""
        try:
            return self._files[name][1].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name!r} cannot be read: {error}") from error

    def _add_shard(self, path: Path) -> None:
        file = _open(path)
        for name in file.keys():  # noqa: SIM118 (no mapping: it has no __iter__)
            if name in self._files:
                raise CheckpointError(f"tensor {name!r} is in two shards, {self._files[name][0]} and {path.name}")
            stored = file.get_slice(name)
            if stored.get_dtype() not in _DTYPES:
                raise CheckpointError(f"tensor {name!r} is stored as {stored.get_dtype()}; expected one of {_DTYPES}")
            self._files[name] = (path.name, file)
            self._shapes[name] = tuple(stored.get_shape())


def _open(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"weight file {path.name} is missing; other kinds, such as pickled .bin, are not read")
    try:
        return safe_open(str(path), framework="np")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"weight file {path.name} is damaged: {error}") from error


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


def _check_listed(listed: Mapping[str, str], files: Mapping[str, tuple[str, Any]]) -> None:
    """The index and the shards agree on which file holds which tensor."""
    for name, shard in listed.items():
        if name not in files or files[name][0] != shard:
            found = files[name][0] if name in files else "no shard"
            raise CheckpointError(f"tensor {name!r} should be in {shard} by {_INDEX}, but is in {found}")
    if surplus := sorted(set(files) - set(listed)):
        raise CheckpointError(f"tensor {surplus[0]!r} is in {files[surplus[0]][0]} but not in {_INDEX}")
