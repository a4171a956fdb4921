"""Weights stored as MXFP4, given as the weights that they stand for.

Knows: the packing of gpt-oss (OCP Microscaling Formats 1.0: 32 e2m1 values share an e8m0 scale). The tensor `X` is
stored as `X_blocks` [..., out, groups, 16], two values a byte, the low half first, and `X_scales` [..., out, groups]. A
checkpoint that is not quantised has the same tensor as `X` [..., in, out], in = 32 * groups, and so it is given here.
"""

import numpy as np
from jaxtyping import Float

from jaxinfer.checkpoint.safetensors import SafetensorsDirectory
from jaxinfer.errors import CheckpointError

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16
_BIAS = 127
_NAN = 255
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NIBBLES = np.array([*_E2M1, *(-value for value in _E2M1)], np.float32)
_PAIRS = np.stack([np.tile(_NIBBLES, 16), np.repeat(_NIBBLES, 16)], axis=1)
"""[256, 2]: the two values of each byte."""


class Mxfp4Tensors:
    """The tensors of `stored` with each `X_blocks` and its `X_scales` as one float32 tensor `X`;
    `shapes` by name.

    Raises CheckpointError where one of the two is missing, misshapen or of another type, or a scale is none (255).
    """

    def __init__(self, stored: SafetensorsDirectory) -> None:
        self._stored = stored
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._packed: set[str] = set()
        for name, shape in stored.shapes.items():
            if stored.dtypes[name] != "U8":
                self._add(name, shape)
            elif name.endswith(_BLOCKS):
                self._packed.add(name.removesuffix(_BLOCKS))
                self._add(name.removesuffix(_BLOCKS), self._unpacked_shape(name, shape))
            elif not name.endswith(_SCALES) or name.removesuffix(_SCALES) + _BLOCKS not in stored.shapes:
                raise CheckpointError(f"tensor {name!r} is stored as U8, but is no mxfp4 block and no block's scale")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Float[np.ndarray, "..."]:
        """The tensor `name`, or its rows `start` to `stop`: decoded in float32, or as stored where it is no MXFP4."""
        if name not in self._packed:
            return self._stored.read(name, start, stop)
        if len(self.shapes[name]) == 2:  # its rows are columns of what is stored
            return self._decode(name, 0, None)[start:stop]
        return self._decode(name, start, stop)

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        if name in self.shapes:
            raise CheckpointError(f"tensor {name!r} is there twice: as it is, and as mxfp4 blocks")
        self.shapes[name] = shape

    def _unpacked_shape(self, blocks: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        scales = blocks.removesuffix(_BLOCKS) + _SCALES
        if len(shape) < 3 or shape[-1] != _BYTES:
            raise CheckpointError(f"tensor {blocks!r} has shape {shape}; expected [..., out, groups, {_BYTES}]")
        if self._stored.shapes.get(scales) != shape[:-1]:
            got = f"has shape {self._stored.shapes[scales]}" if scales in self._stored.shapes else "is missing"
            raise CheckpointError(f"scale {scales!r} {got}; expected {shape[:-1]} beside {blocks!r}")
        if self._stored.dtypes[scales] != "U8":
            raise CheckpointError(f"scale {scales!r} is stored as {self._stored.dtypes[scales]}; expected U8")
        *lead, rows, groups, _ = shape
        return (*lead, groups * 2 * _BYTES, rows)

    def _decode(self, name: str, start: int, stop: int | None) -> Float[np.ndarray, "... width rows"]:
        blocks = self._stored.read(name + _BLOCKS, start, stop)
        scales = self._stored.read(name + _SCALES, start, stop)
        if (scales == _NAN).any():
            raise CheckpointError(f"scale {name + _SCALES!r} holds 255, which is no number; the file is damaged")
        values = _PAIRS[blocks].reshape(*scales.shape, 2 * _BYTES)
        values *= np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)[..., None]
        return values.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)
