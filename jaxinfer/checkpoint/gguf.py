"""GGUF files: llama.cpp's one-file checkpoints, every quantised type decoded to float32.

Knows: how a tensor's bytes become an array. The container is `gguf_header`'s, what a name means is `families`'.
"""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

from jaxinfer.checkpoint.gguf_header import read_header
from jaxinfer.errors import CheckpointError

_PLAIN = {GGMLQuantizationType.F32: np.dtype("<f4"), GGMLQuantizationType.F16: np.dtype("<f2")}


class GGUFTensors:
    """The tensors of one GGUF file, read one at a time; `fields` is its metadata as plain Python values.

    Raises CheckpointError for a damaged file, or one of several parts (join them with llama.cpp's `gguf-split`).
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        parts = header.fields.get("split.count", 1)
        if parts != 1:
            raise CheckpointError(f"{path.name} is one of {parts} parts; join them with `llama-gguf-split --merge`")
        self.fields = header.fields
        self._tensors = header.tensors
        self._bytes = np.memmap(path, mode="r")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor by name, outermost axis first."""
        return {name: info.shape for name, info in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` as stored (float16) or decoded (float32)."""
        info = self._tensors[name]
        raw = np.asarray(self._bytes[info.start : info.start + info.size])
        if info.kind in _PLAIN:
            return raw.view(_PLAIN[info.kind]).reshape(info.shape)
        rows = raw.reshape(*info.shape[:-1], -1)
        try:
            return gguf.dequantize(rows, info.kind).reshape(info.shape)
        except NotImplementedError as error:
            raise CheckpointError(f"tensor {name!r} is stored as {info.kind.name}, which gguf cannot decode") from error
