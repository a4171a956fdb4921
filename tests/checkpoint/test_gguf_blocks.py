"""llama.cpp's blocks as whole numbers with scales: the same weights as `gguf` decodes, whatever the bytes."""

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.checkpoint.gguf_blocks import TYPES, read_blocks

HALVES = {"Q8_0": (0, 1), "Q4_0": (0, 1), "Q5_0": (0, 1), "Q6_K": (208, 1)}
"""Where a block has its float16 numbers, and how many; the other types have two in front."""


def random_blocks(kind: GGMLQuantizationType, count: int) -> np.ndarray:
    """Blocks of random bytes, but for their float16 numbers, which are finite."""
    rng = np.random.default_rng(11)
    raw = rng.integers(0, 256, (count, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    start, numbers = HALVES.get(kind.name, (0, 2))
    halves = rng.normal(size=(count, numbers)).astype("<f2")
    raw[:, start : start + 2 * numbers] = halves.view(np.uint8)
    return raw


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_the_weights_are_those_that_gguf_decodes(kind: GGMLQuantizationType):
    block, _ = GGML_QUANT_SIZES[kind]
    raw = random_blocks(kind, 24)
    values, scale, offset = read_blocks(raw.reshape(-1), kind, (4, 3, 2 * block))
    form = TYPES[kind]
    assert scale.shape == (4, 3, 2 * block // form.group)
    assert (offset is None) == (form.offset_group == 0)
    weights = values * np.repeat(scale, form.group, axis=-1)
    if offset is not None:
        weights = weights + np.repeat(offset, form.offset_group, axis=-1)
    expected = gguf.dequantize(raw.reshape(12, -1), kind).reshape(4, 3, -1)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_values_fit_the_bits_that_the_type_says(kind: GGMLQuantizationType):
    block, _ = GGML_QUANT_SIZES[kind]
    values, _, _ = read_blocks(random_blocks(kind, 64).reshape(-1), kind, (64, block))
    assert values.dtype == np.int8
    bound = 2 ** (TYPES[kind].bits - 1)
    assert -bound <= values.min() < values.max() < bound
    assert int(values.max()) - int(values.min()) >= 15
