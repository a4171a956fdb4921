"""Weights stored as float8 with scales beside them, given as the weights that they stand for.

Knows: which tensor is whose scale, what shape it must have, and that weight = float8 * scale, whatever the scale is
called. The type that a tensor is stored in says whether it has a scale, so the configuration's lists of modules are not
needed.
Sources: transformers' `finegrained_fp8`, compressed-tensors' `float-quantized`, ModelOpt's `FP8`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from jaxinfer.checkpoint.safetensors import SafetensorsDirectory
from jaxinfer.errors import CheckpointError

Shape = tuple[int, ...]
FLOAT8 = ("F8_E4M3", "F8_E5M2")
SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_NOT_OF_WEIGHTS = (".input_scale", ".output_scale", ".activation_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """How a checkpoint's scales are called and laid out.

    suffixes: what the name of a weight's scale may have at its end. strategies: `tensor` has one scale a weight,
    `channel` one a row, `block` one a block of `block` (rows, columns), where the last of each may be cut.
    """

    suffixes: tuple[str, ...]
    strategies: tuple[Literal["tensor", "channel", "block"], ...]
    block: tuple[int, int] = (1, 1)

    def shapes(self, weight: Shape) -> Iterator[Shape]:
        """The shapes that the scale of a weight of shape `weight` may have."""
        *lead, rows, columns = (1, 1, *weight)[-max(2, len(weight)) :]
        if "tensor" in self.strategies:
            yield from ((), (1,))
        if len(weight) < 2:
            return
        if "channel" in self.strategies:
            yield from ((*lead, rows, 1), (*lead, rows))
        if "block" in self.strategies:
            yield (*lead, -(-rows // self.block[0]), -(-columns // self.block[1]))


class Fp8Tensors:
    """The tensors of `stored` with each float8 weight and its scale as one float32 tensor; `shapes` by name.

    `unused` names the scales of activations and of caches: both are computed in the model's own dtype here. Raises
    CheckpointError for a scale that is missing, misshapen, of another type, not finite, or nobody's.
    """

    def __init__(self, stored: SafetensorsDirectory, scheme: Fp8Scheme) -> None:
        self._stored = stored
        self._scheme = scheme
        float8 = [name for name, dtype in stored.dtypes.items() if dtype in FLOAT8]
        self._scales = {name: self._find_scale(name, stored.shapes[name]) for name in float8}
        self._check_surplus()
        hidden = set(self._scales.values())
        self.shapes: Mapping[str, Shape] = {name: shape for name, shape in stored.shapes.items() if name not in hidden}
        self.unused = tuple(name for name in self.shapes if name.endswith(_NOT_OF_WEIGHTS))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Float[np.ndarray, "..."]:
        """The tensor `name`, or its rows `start` to `stop`: decoded in float32, or as stored where it is no float8."""
        values = self._stored.read(name, start, stop)
        if name in self._scales:
            values *= self._read_scale(name, start, start + len(values))
        return values

    def _find_scale(self, name: str, shape: Shape) -> str:
        named = [name + suffix for suffix in self._scheme.suffixes if name + suffix in self._stored.shapes]
        if len(named) != 1:
            wanted = " or ".join(repr(name + suffix) for suffix in self._scheme.suffixes)
            raise CheckpointError(
                f"tensor {name!r} is float8; expected its scale, {wanted}, but found {named or 'none'}"
            )
        scale, expected = named[0], list(self._scheme.shapes(shape))
        if self._stored.shapes[scale] not in expected:
            raise CheckpointError(
                f"scale {scale!r} has shape {self._stored.shapes[scale]}; expected one of {expected} beside {shape}"
            )
        if self._stored.dtypes[scale] not in SCALES:
            raise CheckpointError(
                f"scale {scale!r} is stored as {self._stored.dtypes[scale]}; expected one of {', '.join(SCALES)}"
            )
        return scale

    def _check_surplus(self) -> None:
        owned = set(self._scales.values())
        for name, dtype in self._stored.dtypes.items():
            if name.endswith(self._scheme.suffixes) and not name.endswith(_NOT_OF_WEIGHTS) and name not in owned:
                raise CheckpointError(f"scale {name!r} is surplus: there is no float8 tensor that it belongs to")
            if dtype not in (*FLOAT8, "F32", "BF16", "F16") and name not in owned:
                raise CheckpointError(f"tensor {name!r} is stored as {dtype}, which is no weight's type here")

    def _read_scale(self, name: str, start: int, stop: int) -> Float[np.ndarray, "..."]:
        """The scale of rows `start` to `stop` of the weight `name`, in a shape that multiplies them."""
        scale, weight = self._scales[name], self._stored.shapes[name]
        shape = self._stored.shapes[scale]
        if shape in ((), (1,)):
            return self._finite(scale, self._stored.read(scale)).reshape(())
        if "block" not in self._scheme.strategies or shape != list(self._scheme.shapes(weight))[-1]:
            rows = self._finite(scale, self._stored.read(scale, start, stop))
            return rows if len(shape) == len(weight) else rows[..., None]
        return self._read_blocks(scale, weight, start, stop)

    def _read_blocks(self, scale: str, weight: Shape, start: int, stop: int) -> Float[np.ndarray, "... rows columns"]:
        (high, wide), (rows, columns) = self._scheme.block, weight[-2:]
        if len(weight) > 2:
            grid, skipped = self._stored.read(scale, start, stop), 0
        else:
            grid, skipped, rows = self._stored.read(scale, start // high, -(-stop // high)), start % high, stop - start
        tall = np.repeat(self._finite(scale, grid), high, axis=-2)[..., skipped : skipped + rows, :]
        return np.repeat(tall, wide, axis=-1)[..., :columns]

    def _finite(self, name: str, scale: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        scale = scale.astype(np.float32)
        if not np.isfinite(scale).all():
            raise CheckpointError(f"scale {name!r} holds a value that is not finite; the file is damaged")
        return scale
