"""Products with quantised weights on a GPU, interpreted on CPU and lowered: equal to the reference."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quant_matmul import gpu, reference
from pallas_kernels.quant_matmul.shapes import ROWS, SHAPES, Shape

from .mosaic_gpu import interpreted, lowered_for_gpu
from .test_quant_matmul import make_call

CASES = {
    "by channel": (Shape(128, 256), 3),
    "by channel, many rows": (Shape(64, 128), 130),
    "by channel, several turns of the ring": (Shape(64, 1536), 8),
    "by channel, offset": (Shape(64, 128, offset=True), 3),
    "stages of 64": (Shape(64, 192, "int8", 32), 1),
    "groups of 16": (Shape(64, 128, "int8", 16), 3),
    "groups of 128, offset": (Shape(64, 256, "int8", 128, offset=True), 20),
    "int4": (Shape(64, 128, "int4"), 3),
    "int4 by 32, offset": (Shape(64, 256, "int4", 32, offset=True), 20),
}


def products(shape: Shape, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel and the reference make of the same call."""
    call = make_call(shape, rows, dtype=jnp.bfloat16)
    got = interpreted(partial(gpu.quant_matmul, dtype=jnp.float32), *call)
    return np.asarray(got), np.asarray(reference.quant_matmul(*call, dtype=jnp.float32))


def abstract(shape: Shape, rows: int) -> tuple[Any, ...]:
    """The arguments of a call in full size, without their numbers."""
    of = jax.ShapeDtypeStruct
    scale = of((shape.outputs, shape.groups), jnp.bfloat16)
    weight = of((shape.outputs, shape.inputs), jnp.dtype(shape.values))
    return of((rows, shape.inputs), jnp.bfloat16), weight, scale, scale if shape.offset else None


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    shape, rows = CASES[name]
    got, expected = products(shape, rows)
    exact = shape.group == 0 and not shape.offset  # otherwise each weight is rounded to bfloat16, by up to 2^-9 of it
    within = (2e-6 if exact else 2**-9) * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, atol=within, rtol=0)


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.group and "llama" not in name])
def test_equals_the_reference_on_real_weights(name: str) -> None:
    shape = replace(SHAPES[name], outputs=64)
    got, expected = products(shape, 2)
    np.testing.assert_allclose(got, expected, atol=2**-9 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("rows", [ROWS[0], ROWS[-1]])
@pytest.mark.parametrize("name", SHAPES)
def test_lowers_to_mosaic_gpu(name: str, rows: int) -> None:
    text = lowered_for_gpu(partial(gpu.quant_matmul, dtype=jnp.bfloat16), *abstract(SHAPES[name], rows))
    assert text.count("custom_call @mosaic_gpu") == 1


REFUSED = {
    "multiples of 64": Shape(96, 128),
    "96 inputs": Shape(64, 96),
    "groups of 24": Shape(64, 192, "int8", 24),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses_what_it_cannot_cut(reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        gpu.quant_matmul(*make_call(REFUSED[reason], 1, dtype=jnp.bfloat16), dtype=jnp.float32)


def test_refuses_to_round_x() -> None:
    with pytest.raises(NotImplementedError, match="x is float32"):
        gpu.quant_matmul(*make_call(Shape(64, 128), 1), dtype=jnp.float32)


def test_groups_that_do_not_divide_the_inputs_are_an_error() -> None:
    x, values, _, _ = make_call(Shape(64, 128), 1, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="divides"):
        gpu.quant_matmul(x, values, jnp.ones((64, 3)), None, dtype=jnp.float32)


def test_few_programs_share_the_inputs_and_many_do_not() -> None:
    assert gpu._shares(96, 32) == 4, "384 programs; 3 shares would be enough and do not divide 32 tiles"
    assert gpu._shares(64, 32) == 4, "8 tiles are left to each, two turns of the ring"
    assert gpu._shares(448, 32) == 1
    assert gpu._shares(1, 7) == 1
