"""Tensors in pieces: the same numbers whatever the pieces are, in arrays that a CPU device takes without a copy."""

from collections.abc import Mapping
from math import prod

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.checkpoint import tensors as module
from jaxinfer.checkpoint.tensors import empty, equal, pieces, read_as
from jaxinfer.errors import CheckpointError

F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


class InMemory:
    """Tensors that count what is read of them."""

    def __init__(self, **tensors: np.ndarray) -> None:
        self.tensors = tensors
        self.shapes: Mapping[str, tuple[int, ...]] = {name: value.shape for name, value in tensors.items()}
        self.largest = 0

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        piece = self.tensors[name][start:stop]
        self.largest = max(self.largest, piece.size)
        return piece


@pytest.mark.parametrize("shape", [(7,), (7, 3), (1, 9), (5, 2, 3), (0, 4), (4, 0)])
@pytest.mark.parametrize("piece", [1, 5, 6, 1000])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_pieces_are_the_whole(shape: tuple[int, ...], piece: int, dtype: np.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_PIECE", piece)
    value = np.random.default_rng(0).standard_normal(shape, np.float32)
    tensors = InMemory(a=value)
    np.testing.assert_array_equal(read_as(tensors, "a", dtype), value.astype(dtype))
    if len(shape) > 1:
        assert tensors.largest <= max(piece, prod(shape[1:]))


def test_axes_lie_in_memory_as_the_reader_has_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_PIECE", 10)
    value = np.random.default_rng(0).standard_normal((3, 5, 4), np.float32).swapaxes(1, 2)
    found = read_as(InMemory(a=value), "a", BF16)
    np.testing.assert_array_equal(found, value.astype(BF16))
    assert found.swapaxes(1, 2).flags.c_contiguous


def test_a_hostile_shape_has_no_endless_pieces():
    assert not list(pieces((2**62, 0)))


def test_equal_compares_shapes_and_every_piece(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_PIECE", 4)
    value = np.arange(12, dtype=np.float32).reshape(6, 2)
    other = value.copy()
    other[-1, -1] = -1
    tensors = InMemory(a=value, b=value.copy(), c=other, d=value.reshape(2, 6))
    assert equal(tensors, "a", "b")
    assert not equal(tensors, "a", "c")
    assert not equal(tensors, "a", "d")


def test_an_overflow_while_decoding_is_named():
    class Overflowing(InMemory):
        def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
            return super().read(name, start, stop) * np.float32(1e38)

    with pytest.raises(CheckpointError, match="'a' holds numbers that are not finite"):
        read_as(Overflowing(a=np.full((2, 2), 1e3, np.float32)), "a", F32)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_device_takes_an_array_as_it_is(dtype: np.dtype):
    """The model would lie in memory twice otherwise, for a moment."""
    for _ in range(8):  # what malloc gives is aligned by chance now and then
        host = empty((33, 65), dtype)
        host[:] = 1
        assert jax.device_put(host, jax.devices("cpu")[0]).unsafe_buffer_pointer() == host.ctypes.data
