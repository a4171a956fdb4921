"""The GPU's prefill kernel: interpreted, it is the reference but for bfloat16; and it lowers to Mosaic GPU.

The interpreter checks races of copies, fills shared memory with NaN and raises where a copy leaves an array, as one
would that follows a table entry past the length.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_prefill_attention import gpu, reference
from pallas_kernels.paged_prefill_attention.shapes import SHAPES, Shape
from pallas_kernels.pages import empty_pages

from .attention_cases import how, run_prefill
from .gpu_attention_cases import check_close, make_rounded_case, small
from .mosaic_gpu import INTERPRET, lowered_for_gpu

REFUSED = {"deepseek-v3 last chunk of 128, one plane": "1 plane"}
interpreted = partial(gpu.paged_prefill_attention, interpret=INTERPRET)
check = partial(check_close, run_prefill, interpreted, reference.paged_prefill_attention)

ROWS = {
    "whole chunk, part of one, empty row": (Shape(1, 40, 0, 1, 2, 64), [100, 7, 0]),
    "padding behind a window, sinks, softcap": (Shape(1, 70, 0, 1, 2, 64, 16, 5, 1.5, sinks=True), [133, 20]),
    "two heads, one token": (Shape(1, 2, 0, 2, 3, 16, 8), [65, 1]),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_query_is_the_references(name: str) -> None:
    shape, lengths = ROWS[name]
    check(make_rounded_case(shape, lengths), shape)


@pytest.mark.parametrize("name", (shapes := small(SHAPES, REFUSED, 20)))
def test_real_shapes_are_the_references(name: str) -> None:
    shape = shapes[name]
    check(make_rounded_case(shape, [shape.length]), shape)


def test_int8_pages_are_the_references() -> None:
    shape = Shape(1, 20, 0, 1, 2, 64, 32, 30)
    check(make_rounded_case(shape, [70], int8=True), shape)


def arguments(shape: Shape, dtype: Any = jnp.bfloat16, pages: Any = jnp.bfloat16) -> tuple[Any, ...]:
    """Abstract queries, pages, page table, positions, lengths and sinks."""
    pool = (shape.rows * shape.table_width, shape.planes, shape.kv_heads, shape.page_size, shape.head_dim)
    return (
        jax.ShapeDtypeStruct((shape.rows, shape.tokens, shape.kv_heads, shape.group, shape.head_dim), dtype),
        jax.eval_shape(lambda: empty_pages(pool, pages)),
        jax.ShapeDtypeStruct((shape.rows, shape.table_width), jnp.int32),
        jax.ShapeDtypeStruct((shape.rows, shape.tokens), jnp.int32),
        jax.ShapeDtypeStruct((shape.rows,), jnp.int32),
        jax.ShapeDtypeStruct((shape.kv_heads, shape.group), jnp.float32) if shape.sinks else None,
    )


def call(shape: Shape) -> Any:
    return lambda *arrays: gpu.paged_prefill_attention(*arrays[:-1], sinks=arrays[-1], **how(shape))


@pytest.mark.parametrize("name", SHAPES)
def test_real_shapes_lower_to_mosaic_gpu_or_are_refused(name: str) -> None:
    shape = SHAPES[name]
    if name in REFUSED:
        with pytest.raises(NotImplementedError, match=REFUSED[name]):
            lowered_for_gpu(call(shape), *arguments(shape))
        return
    text = lowered_for_gpu(call(shape), *arguments(shape))
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "paged_prefill_attention" in text
    assert "stablehlo.gather" not in text, "the pages are gathered outside of the kernel"


def test_int8_pages_lower_to_mosaic_gpu() -> None:
    shape = SHAPES["llama3-8b last chunk of 1024, pages of 128"]
    assert "custom_call @mosaic_gpu" in lowered_for_gpu(call(shape), *arguments(shape, pages=jnp.int8))


@pytest.mark.parametrize(
    ("dtype", "pages", "reason"), [(jnp.float32, jnp.bfloat16, "queries"), (jnp.bfloat16, jnp.float32, "pages")]
)
def test_what_the_kernel_cannot_do_is_refused_with_a_reason(dtype: Any, pages: Any, reason: str) -> None:
    shape = Shape(1, 8, 64, 1, 1, 64)
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(call(shape), *arguments(shape, dtype, pages))


@pytest.mark.parametrize(("group", "window"), [(1, None), (4, None), (3, 10), (3, 200), (64, 1)])
def test_a_tile_walks_over_just_the_blocks_that_its_queries_see(group: int, window: int | None) -> None:
    static = gpu.Call(1, group, 64, 64, False, window, 1.0, None, False)
    start, count = 100, 150
    for tile in range(-(-200 * group // 64)):
        tokens = [row // group for row in range(tile * 64, tile * 64 + 64) if row // group < count]
        positions = [start + token for token in tokens]
        begins = [0 if window is None else max(0, position - window + 1) for position in positions]
        span = gpu._span(static, jnp.int32(tile), jnp.int32(start), jnp.int32(count))
        if tokens:
            assert (int(span.begin), int(span.end)) == (min(begins), max(positions) + 1)
            assert (int(span.first), int(span.last)) == (min(begins) // 64, max(positions) // 64 + 1)
        else:
            assert span.first >= span.last
