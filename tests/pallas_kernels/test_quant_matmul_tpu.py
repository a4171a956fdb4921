"""Quantised products on TPU, interpreted: the reference's result, in float32's precision, and no races."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quant_matmul import tpu
from pallas_kernels.quant_matmul.shapes import SHAPES, Shape

from .mosaic_tpu import run_without_races
from .test_quant_matmul import assert_near, by_hand, make_call
from .test_tpu_chip import on


def run(form: Any, *call: Any) -> np.ndarray:
    return np.asarray(form(*call, dtype=jnp.float32))


SMALL = {
    "by channel": Shape(200, 96),
    "by channel, offset": Shape(40, 7, offset=True),
    "int8 in groups of 16, part of a piece, offset": Shape(200, 160, "int8", 16, offset=True),
    "int4 in groups, several pieces, offset": Shape(136, 768, "int4", 32, offset=True),
    "int4 in groups": Shape(40, 64, "int4", 32),
}


@pytest.mark.parametrize(
    ("name", "rows", "dtype"),
    [
        ("by channel", 3, "float32"),
        ("by channel, offset", 1, "float32"),
        ("int8 in groups of 16, part of a piece, offset", 3, "bfloat16"),
        ("int4 in groups, several pieces, offset", 9, "float32"),
        ("int4 in groups", 8, "bfloat16"),
    ],
)
def test_small_products_equal_the_reference(name: str, rows: int, dtype: str) -> None:
    call = make_call(SMALL[name], rows, dtype=jnp.dtype(dtype))
    assert_near(run_without_races(run, tpu.quant_matmul, *call), by_hand(*call), 1e-6)


def test_float32_is_not_rounded() -> None:
    """Of make_call's x the two pieces after the first are zero."""
    x, *weight = make_call(SMALL["int8 in groups of 16, part of a piece, offset"], 2)
    x = x * jnp.float32(1 / 3)
    assert_near(run_without_races(run, tpu.quant_matmul, x, *weight), by_hand(x, *weight), 1e-6)


@pytest.mark.parametrize("name", [name for name in SHAPES if "smollm2" in name or "gemma" in name or " out" in name])
def test_real_weights_equal_the_reference(name: str) -> None:
    """300 of their outputs: blocks of 128 would not divide them."""
    call = make_call(replace(SHAPES[name], outputs=300), 1, dtype=jnp.bfloat16)
    assert_near(run_without_races(run, tpu.quant_matmul, *call), by_hand(*call), 3e-6)


def test_the_result_is_of_the_dtype_that_is_asked() -> None:
    call = make_call(SMALL["by channel"], 3, dtype=jnp.bfloat16)
    wide, narrow = (
        run_without_races(lambda form, *call: form(*call, dtype=dtype), tpu.quant_matmul, *call)  # noqa: B023
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("shape", "rows", "why"),
    [
        (Shape(40, 66, "int4", 11, offset=True), 2, "groups of 11 inputs"),
        (Shape(40, 512, "int8", 8), 2, "groups of 8 inputs"),
        (Shape(40, 96), 65, "65 rows"),
        (Shape(256, 2**17), 1, "131072 inputs of 8 rows and 128 outputs do not fit"),
    ],
)
def test_what_it_cannot_do_it_refuses_and_says_why(shape: Shape, rows: int, why: str) -> None:
    with pytest.raises(NotImplementedError, match=why):
        trace(shape, rows)


def trace(shape: Shape, rows: int) -> None:
    scale = jax.ShapeDtypeStruct((shape.outputs, shape.groups), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((rows, shape.inputs), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((shape.outputs, shape.inputs), jnp.dtype(shape.values))
    jax.eval_shape(
        lambda *call: tpu.quant_matmul(*call, dtype=jnp.float32), x, values, scale, scale if shape.offset else None
    )


def test_v4_is_left_to_xla() -> None:
    with on("TPU v4"), pytest.raises(NotImplementedError, match="TPU v4: plain XLA"):
        trace(SMALL["int4 in groups"], 8)
    with on("TPU v5 lite"):
        trace(SMALL["int4 in groups"], 8)


def test_no_kernel_loads_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """x, scales and offsets go to the kernel, and the product comes from it, in numbers that it has loads for."""
    seen = []
    real = tpu._call

    def call(kernel: Any, blocks: Any, args: Any, specs: Any, scratch: Any, dtype: Any, interpret: Any) -> Any:
        seen.extend([*(arg.dtype for arg in args), jnp.dtype(dtype)])
        return real(kernel, blocks, args, specs, scratch, dtype, interpret)

    monkeypatch.setattr(tpu, "_call", call)
    half = jnp.float16
    x, values, scale, offset = make_call(SMALL["int4 in groups, several pieces, offset"], 3, dtype=half)
    for of in (half, jnp.bfloat16):
        product = partial(tpu.quant_matmul, dtype=half)
        assert jax.eval_shape(product, x.astype(of), values, scale, offset).dtype == half
    assert {dtype.name for dtype in seen} == {"bfloat16", "float32", "int4"}
