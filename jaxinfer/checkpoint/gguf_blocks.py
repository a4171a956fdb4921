"""llama.cpp's quantised blocks as whole numbers, scales and offsets, without a decoded weight on the way.

Knows: the bytes of each block type (github.com/ggml-org/ggml, src/ggml-common.h) and which types are whole numbers
times a scale, plus an offset: those are kept exactly. Knows no file and no model.

A nibble holds 0 to 15. It is kept as int4, -8 to 7, and the 8 goes into the offset.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from jaxtyping import Float32, Int8, UInt8

Bytes = UInt8[np.ndarray, "n bytes"]


class Parts(NamedTuple):
    """n blocks: values [n, block], one scale per equal group of them, and one offset per equal group or none."""

    values: Int8[np.ndarray, "n block"]
    scale: Float32[np.ndarray, "n groups"]
    offset: Float32[np.ndarray, "n offsets"] | None = None


class BlockType(NamedTuple):
    """How a type is read: bits that its values need (4 or 8), values per scale and per offset (0: it has none)."""

    bits: int
    group: int
    offset_group: int
    read: Callable[[Bytes], Parts]


def _halves(blocks: Bytes, start: int, count: int = 1) -> Float32[np.ndarray, "n count"]:
    """`count` float16 numbers from byte `start` on."""
    return np.ascontiguousarray(blocks[:, start : start + 2 * count]).view("<f2").astype(np.float32)


def _nibbles(packed: UInt8[np.ndarray, "n bytes"], run: int) -> UInt8[np.ndarray, "n values"]:
    """Of every `run` bytes first the low nibbles, then the high ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(packed), -1)


def _minus(values: UInt8[np.ndarray, "n values"], zero: int) -> Int8[np.ndarray, "n values"]:
    return values.view(np.int8) - np.int8(zero)


def _q8_0(blocks: Bytes) -> Parts:
    return Parts(blocks[:, 2:].view(np.int8), _halves(blocks, 0))


def _q4_0(blocks: Bytes) -> Parts:
    return Parts(_minus(_nibbles(blocks[:, 2:], 16), 8), _halves(blocks, 0))


def _q4_1(blocks: Bytes) -> Parts:
    scale = _halves(blocks, 0)
    return Parts(_minus(_nibbles(blocks[:, 4:], 16), 8), scale, 8 * scale + _halves(blocks, 2))


def _fifth_bits(packed: UInt8[np.ndarray, "n 4"]) -> UInt8[np.ndarray, "n 32"]:
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> Parts:
    return Parts(_minus(_nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), 16), _halves(blocks, 0))


def _q5_1(blocks: Bytes) -> Parts:
    values = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return Parts(_minus(values, 0), _halves(blocks, 0), _halves(blocks, 2))


def _six_bits(packed: UInt8[np.ndarray, "n 12"]) -> tuple[UInt8[np.ndarray, "n 8"], UInt8[np.ndarray, "n 8"]]:
    """The scales and minima of a K block's eight groups: six bits each, of the last four groups in two pieces."""
    first, second, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (low & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (low >> 4) | (second >> 6 << 4)], axis=1)
    return scales, minima


def _scales_of_k(blocks: Bytes) -> tuple[Float32[np.ndarray, "n 8"], Float32[np.ndarray, "n 8"]]:
    """Scale and minimum of each group; the minimum is taken off."""
    scales, minima = _six_bits(blocks[:, 4:16])
    return _halves(blocks, 0) * scales, _halves(blocks, 2) * minima


def _q4_k(blocks: Bytes) -> Parts:
    scale, minimum = _scales_of_k(blocks)
    return Parts(_minus(_nibbles(blocks[:, 16:], 32), 8), scale, 8 * scale - minimum)


def _q5_k(blocks: Bytes) -> Parts:
    scale, minimum = _scales_of_k(blocks)
    bits = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little")  # group j's fifth bits are bit j of each
    fifth = bits.swapaxes(1, 2).reshape(len(blocks), -1) << np.uint8(4)
    return Parts(_minus(_nibbles(blocks[:, 48:], 32) | fifth, 0), scale, -minimum)


def _q6_k(blocks: Bytes) -> Parts:
    low = _nibbles(blocks[:, :128], 64)
    pairs = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (pairs & 3).reshape(len(blocks), -1) << np.uint8(4)
    return Parts(_minus(low | high, 32), _halves(blocks, 208) * blocks[:, 192:208].view(np.int8))


_T = GGMLQuantizationType
TYPES = {
    _T.Q8_0: BlockType(8, 32, 0, _q8_0),
    _T.Q4_0: BlockType(4, 32, 0, _q4_0),
    _T.Q4_1: BlockType(4, 32, 32, _q4_1),
    _T.Q5_0: BlockType(8, 32, 0, _q5_0),
    _T.Q5_1: BlockType(8, 32, 32, _q5_1),
    _T.Q4_K: BlockType(4, 32, 32, _q4_k),
    _T.Q5_K: BlockType(8, 32, 32, _q5_k),
    _T.Q6_K: BlockType(8, 16, 0, _q6_k),
}
"""The types that are kept as they are."""


def read_blocks(
    raw: UInt8[np.ndarray, " bytes"], kind: GGMLQuantizationType, shape: tuple[int, ...]
) -> tuple[Int8[np.ndarray, "..."], Float32[np.ndarray, "..."], Float32[np.ndarray, "..."] | None]:
    """values, scale and offset of a tensor of `shape` whose bytes are `raw`; groups lie along its last axis."""
    parts = TYPES[kind].read(raw.reshape(-1, GGML_QUANT_SIZES[kind][1]))
    lead = shape[:-1]
    offset = None if parts.offset is None else parts.offset.reshape(*lead, -1)
    return parts.values.reshape(shape), parts.scale.reshape(*lead, -1), offset
