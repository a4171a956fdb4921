"""Cache writes on a GPU, interpreted on CPU and lowered: equal to the reference, nothing else touched, in place."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import gpu, reference
from pallas_kernels.kv_write.shapes import SHAPES, Shape
from pallas_kernels.pages import empty_pages, quantise

from .mosaic_gpu import interpreted, lowered_for_gpu
from .test_kv_write import make_call

DTYPES = ("float32", "bfloat16", "int8")
ROWS = {
    "decode": (Shape(1, 1, 0, 2, 16, 8), [1, 1, 0, 1], [0, 23, 0, 8]),
    "across pages, padded": (Shape(1, 16, 0, 2, 16, 8), [16, 5], [3, 6]),
    "two blocks": (Shape(1, 32, 0, 1, 16, 16), [32], [7]),
    "one plane, several copies a head": (Shape(1, 2, 0, 1, 576, 8, planes=1), [2], [7]),
}


def call_in(dtype: str, shape: Shape, counts: list[int], starts: list[int]) -> tuple[Any, ...]:
    """`make_call` with a pool of `dtype`."""
    pool, *rest = jax.tree.map(jnp.asarray, make_call(shape, counts, starts))
    return quantise(pool) if dtype == "int8" else pool.astype(dtype), *rest


def shrunk(shape: Shape) -> tuple[Shape, list[int], list[int]]:
    """A real shape as the interpreter does it in a second: one head, few tokens, the last of them padding."""
    shape = replace(shape, tokens=min(shape.tokens, 16), kv_heads=1)
    return shape, [max(1, shape.tokens - 1)], [shape.start]


def abstract(shape: Shape, dtype: str) -> tuple[Any, ...]:
    """The arguments of a call in full size, without their numbers."""
    rows, pages = shape.rows, shape.rows * shape.table_width + 1
    new = jax.ShapeDtypeStruct((rows, shape.tokens, shape.kv_heads, shape.head_dim), jnp.bfloat16)
    pool_shape = (pages, shape.planes, shape.kv_heads, shape.page_size, shape.head_dim)
    pool = jax.eval_shape(lambda: empty_pages(pool_shape, dtype))
    table = jax.ShapeDtypeStruct((rows, shape.table_width), jnp.int32)
    positions = jax.ShapeDtypeStruct((rows, shape.tokens), jnp.int32)
    return pool, new, new if shape.planes == 2 else None, table, positions


def assert_same(got: Any, expected: Any) -> None:
    jax.tree.map(
        lambda got, expected: np.testing.assert_array_equal(np.asarray(got), np.asarray(expected)), got, expected
    )


@pytest.mark.parametrize("name", ROWS)
def test_equals_the_reference(name: str) -> None:
    call = call_in("float32", *ROWS[name])
    assert_same(interpreted(gpu.kv_write, *call), reference.kv_write(*call))


def test_equals_the_reference_in_int8() -> None:
    call = call_in("int8", Shape(1, 3, 0, 2, 16, 8), [3, 1], [7, 0])
    assert_same(interpreted(gpu.kv_write, *call), jax.jit(reference.kv_write)(*call))


@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_reference_on_real_shapes(name: str) -> None:
    call = call_in("bfloat16", *shrunk(SHAPES[name]))
    assert_same(interpreted(gpu.kv_write, *call), jax.jit(reference.kv_write)(*call))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_lowers_to_mosaic_gpu_in_place(name: str, dtype: str) -> None:
    text = lowered_for_gpu(gpu.kv_write, *abstract(SHAPES[name], dtype))
    assert text.count("custom_call @mosaic_gpu") == 1
    kernel = next(line for line in text.splitlines() if "custom_call @mosaic_gpu" in line)
    assert kernel.count("output_operand_alias<") == (2 if dtype == "int8" else 1)


def test_refuses_a_head_that_copies_cannot_move() -> None:
    call = call_in("bfloat16", Shape(1, 1, 0, 1, 4, 8), [1], [0])
    with pytest.raises(NotImplementedError, match="a head takes 8 bytes"):
        gpu.kv_write(*call)
