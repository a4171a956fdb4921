"""GGUF files: llama.cpp's one-file checkpoints, every quantised type decoded to float32.

Knows: how a tensor's bytes become an array. The container is `gguf_header`'s, what a name means is `families`'.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from jaxtyping import Float32, Int8, Shaped, UInt8

from jaxinfer.checkpoint.gguf_blocks import TYPES, read_blocks
from jaxinfer.checkpoint.gguf_header import TensorInfo, read_header
from jaxinfer.checkpoint.stored import Grouping
from jaxinfer.checkpoint.tensors import read_bytes
from jaxinfer.errors import CheckpointError, ConfigError

_PLAIN = {GGMLQuantizationType.F32: np.dtype("<f4"), GGMLQuantizationType.F16: np.dtype("<f2")}
_UNQUANTISED = {*_PLAIN, GGMLQuantizationType.BF16, GGMLQuantizationType.F64}


class GGUFTensors:
    """The tensors of one GGUF file, read one at a time; `fields` is its metadata as plain Python values,
    `shapes` has each tensor's shape by name, outermost axis first.

    Raises CheckpointError for a damaged file, or one of several parts (join them with llama.cpp's `gguf-split`).
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        parts = header.fields.get("split.count", 1)
        if parts != 1:
            raise CheckpointError(f"{path.name} is one of {parts} parts; join them with `llama-gguf-split --merge`")
        self.fields = header.fields
        self._tensors = header.tensors
        self._path = path
        self.shapes: Mapping[str, tuple[int, ...]] = {name: info.shape for name, info in header.tensors.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Shaped[np.ndarray, "..."]:
        """The tensor `name`, or its rows `start` to `stop`, as stored (float16) or decoded (float32)."""
        info = self._tensors[name]
        start, stop, _ = slice(start, stop).indices(info.shape[0])
        shape = (max(0, stop - start), *info.shape[1:])
        raw = self._raw(info, start * prod(shape[1:]), prod(shape))
        if info.kind in _PLAIN:
            return raw.view(_PLAIN[info.kind]).reshape(shape)
        try:
            return gguf.dequantize(raw.reshape(*shape[:-1], -1), info.kind).reshape(shape)
        except NotImplementedError as error:
            raise CheckpointError(f"tensor {name!r} is stored as {info.kind.name}, which gguf cannot decode") from error

    @property
    def kinds(self) -> Mapping[str, str]:
        """The names of the block types that tensors are quantised as; plain tensors are left out."""
        return {name: info.kind.name for name, info in self._tensors.items() if info.kind not in _UNQUANTISED}

    def grouping(self, name: str) -> Grouping | None:
        """How the tensor `name` is quantised; None where it is plain.

        Raises ConfigError where its numbers are not whole ones times a scale, so that it can only be decoded.
        """
        kind = self._tensors[name].kind
        if kind in _UNQUANTISED:
            return None
        if kind not in TYPES:
            known = ", ".join(kind.name for kind in TYPES)
            raise ConfigError(
                f"quantize is 'stored', but tensor {name!r} is stored as {kind.name}; what is kept as it is: {known}. "
                "Leave quantize out, or choose int8 or int4"
            )
        return Grouping(TYPES[kind].bits, TYPES[kind].group, TYPES[kind].offset_group)

    def read_quantised(
        self, name: str, start: int, stop: int
    ) -> tuple[Int8[np.ndarray, "..."], Float32[np.ndarray, "..."], Float32[np.ndarray, "..."] | None]:
        """values, scale and offset of rows `start` to `stop` of a tensor that has a `grouping`; nothing is decoded."""
        info = self._tensors[name]
        shape = (stop - start, *info.shape[1:])
        return read_blocks(self._raw(info, start * prod(shape[1:]), prod(shape)), info.kind, shape)

    def _raw(self, info: TensorInfo, first: int, count: int) -> UInt8[np.ndarray, " bytes"]:
        """The bytes of `count` values from the value `first` on; both fall on blocks, since every row does."""
        block, block_bytes = GGML_QUANT_SIZES[info.kind]
        raw = np.empty(count // block * block_bytes, np.uint8)
        read_bytes(self._path, info.start + first // block * block_bytes, raw)
        return raw
