"""A checkpoint's tensors, read a bounded piece at a time.

Knows: how a tensor becomes an array of another dtype without lying in host memory twice, and that bytes are read and
not mapped: a mapped page stays in memory for as long as its file is open. Knows no file format.
"""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Shaped

from jaxinfer.errors import CheckpointError

_PIECE = 2**22
"""Most elements of a piece; 16 MiB in float32."""
_ALIGNMENT = 64
"""Bytes. XLA's CPU client takes arrays that start at a multiple as they are, and copies others."""


class Tensors(Protocol):
    """A checkpoint that can be read one tensor, or some rows of one, at a time."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor by name."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The tensor `name`, or its rows `start` to `stop` along the first axis, as float32, bfloat16 or float16."""
        ...


def read_as(tensors: Tensors, name: str, dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """The tensor `name` in `dtype`. The host holds it once, and one piece of it as it is read.

    The axes lie in memory as the reader has them, so that a reader that transposes costs no copy. Raises
    CheckpointError where the tensor cannot be read, or overflows while it is decoded.
    """
    shape = tensors.shapes[name]
    if len(shape) < 2:
        return _read(tensors, name, 0, None).astype(dtype, copy=False)
    whole = None
    for start, stop in pieces(shape):
        piece = _read(tensors, name, start, stop)
        whole = _empty_like(piece, shape, dtype) if whole is None else whole
        whole[start:stop] = piece
    return empty(shape, dtype) if whole is None else whole


def equal(tensors: Tensors, one: str, other: str) -> bool:
    """Whether two tensors hold the same values. Raises as `read_as` does."""
    shape = tensors.shapes[one]
    return shape == tensors.shapes[other] and all(
        np.array_equal(_read(tensors, one, *rows), _read(tensors, other, *rows)) for rows in pieces(shape)
    )


def _read(tensors: Tensors, name: str, start: int, stop: int | None) -> Shaped[np.ndarray, "..."]:
    try:
        with np.errstate(over="raise", invalid="raise"):
            return tensors.read(name, start, stop)
    except FloatingPointError as error:
        raise CheckpointError(f"tensor {name!r} holds numbers that are not finite ({error}); it is damaged") from error


def pieces(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """First row and end of each piece of a tensor of `shape`. A vector is one piece: blocks of it may be packed."""
    if len(shape) < 2:
        yield 0, prod(shape)
    elif size := prod(shape[1:]):
        rows = max(1, _PIECE // size)
        for start in range(0, shape[0], rows):
            yield start, min(start + rows, shape[0])


def read_bytes(path: Path, start: int, out: Shaped[np.ndarray, "..."]) -> None:
    """Fill `out` with the bytes of the file from `start` on. Raises CheckpointError where they are not there."""
    left = out.reshape(-1).view(np.uint8).data
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while left and (size := file.readinto(left)):  # one call reads 2 GiB at the most
                left = left[size:]
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    if left:
        raise CheckpointError(f"{path.name} has become shorter while it was read; load it again")


def empty(shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """An array that a CPU device takes as it is, without a copy."""
    size = prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _empty_like(piece: Shaped[np.ndarray, "..."], shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """An array of `shape` whose axes lie in memory in the order of `piece`'s."""
    order = sorted(range(len(shape)), key=lambda axis: -piece.strides[axis])
    return empty(tuple(shape[axis] for axis in order), dtype).transpose(
        [order.index(axis) for axis in range(len(shape))]
    )
