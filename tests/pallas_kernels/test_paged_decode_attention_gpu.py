"""The GPU's decode kernel: interpreted, it is the reference but for bfloat16; and it lowers to Mosaic GPU.

The interpreter checks races of copies, fills shared memory with NaN and raises where a copy leaves an array, as one
would that follows a table entry past the length.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_decode_attention import gpu, reference
from pallas_kernels.paged_decode_attention.shapes import SHAPES, Shape
from pallas_kernels.pages import empty_pages

from .attention_cases import how, run_decode
from .gpu_attention_cases import check_close, make_rounded_case, small
from .mosaic_gpu import INTERPRET, lowered_for_gpu

REFUSED = {"deepseek-v3 4 x 256, one plane": "1 plane"}
interpreted = partial(gpu.paged_decode_attention, interpret=INTERPRET)
check = partial(check_close, run_decode, interpreted, reference.paged_decode_attention)

ROWS = {
    "empty row, one key, block's edge": (Shape(1, 1, 0, 2, 3, 64), [0, 1, 64, 65]),
    "splits": (Shape(1, 1, 0, 1, 2, 64), [700, 3]),
    "splits of a window, sinks": (Shape(1, 1, 0, 1, 2, 64, 16, window=530, sinks=True), [0, 650]),
    "window of 1": (Shape(1, 1, 0, 1, 1, 64, 16, window=1), [65, 2]),
    "small pages, sinks, softcap": (Shape(1, 1, 0, 1, 9, 16, 8, softcap=1.5, sinks=True), [0, 70]),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_the_references(name: str) -> None:
    shape, lengths = ROWS[name]
    check(make_rounded_case(shape, lengths), shape)


@pytest.mark.parametrize("name", (shapes := small(SHAPES, REFUSED, 1)))
def test_real_shapes_are_the_references(name: str) -> None:
    shape = shapes[name]
    check(make_rounded_case(shape, [shape.length]), shape)


INT8 = {
    "pages of 16": (Shape(1, 1, 0, 2, 3, 80, 16, window=60), [0, 130]),
    "pages of 128": (Shape(1, 1, 0, 1, 4, 128, 128, sinks=True), [70]),
}


@pytest.mark.parametrize("name", INT8)
def test_int8_pages_are_the_references(name: str) -> None:
    shape, lengths = INT8[name]
    check(make_rounded_case(shape, lengths, int8=True), shape)


def arguments(shape: Shape, dtype: Any = jnp.bfloat16, pages: Any = jnp.bfloat16) -> tuple[Any, ...]:
    """Abstract queries, pages, page table, lengths and sinks."""
    pool = (shape.rows * shape.table_width, shape.planes, shape.kv_heads, shape.page_size, shape.head_dim)
    return (
        jax.ShapeDtypeStruct((shape.rows, shape.kv_heads, shape.group, shape.head_dim), dtype),
        jax.eval_shape(lambda: empty_pages(pool, pages)),
        jax.ShapeDtypeStruct((shape.rows, shape.table_width), jnp.int32),
        jax.ShapeDtypeStruct((shape.rows,), jnp.int32),
        jax.ShapeDtypeStruct((shape.kv_heads, shape.group), jnp.float32) if shape.sinks else None,
    )


def call(shape: Shape) -> Any:
    return lambda *arrays: gpu.paged_decode_attention(*arrays[:-1], sinks=arrays[-1], **how(shape))


@pytest.mark.parametrize("name", SHAPES)
def test_real_shapes_lower_to_mosaic_gpu_or_are_refused(name: str) -> None:
    shape = SHAPES[name]
    if name in REFUSED:
        with pytest.raises(NotImplementedError, match=REFUSED[name]):
            lowered_for_gpu(call(shape), *arguments(shape))
        return
    text = lowered_for_gpu(call(shape), *arguments(shape))
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "paged_decode_attention" in text
    assert "stablehlo.gather" not in text, "the pages are gathered outside of the kernel"


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in REFUSED][-3:])
def test_int8_pages_lower_to_mosaic_gpu(name: str) -> None:
    arrays = arguments(SHAPES[name], pages=jnp.int8)
    assert lowered_for_gpu(call(SHAPES[name]), *arrays).count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "pages", "reason"),
    [
        (Shape(1, 1, 64, 1, 1, 64), jnp.float32, jnp.bfloat16, "queries are float32"),
        (Shape(1, 1, 64, 1, 1, 64), jnp.bfloat16, jnp.float32, "pages float32"),
        (Shape(1, 1, 64, 1, 1, 64), jnp.float32, jnp.int8, "queries are float32"),
        (Shape(1, 1, 64, 1, 1, 72), jnp.bfloat16, jnp.bfloat16, "heads of 72"),
        (Shape(1, 1, 64, 1, 1, 512), jnp.bfloat16, jnp.bfloat16, "heads of 512"),
        (Shape(1, 1, 64, 1, 1, 64, 24), jnp.bfloat16, jnp.bfloat16, "pages of 24 tokens"),
        (Shape(1, 1, 64, 1, 65, 64), jnp.bfloat16, jnp.bfloat16, "65 query heads"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_the_kernel_cannot_do_is_refused_with_a_reason(shape: Shape, dtype: Any, pages: Any, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(call(shape), *arguments(shape, dtype, pages))


def test_a_gpu_that_is_no_hopper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["smollm2-135m 8 x 1024"]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability="8.0")])
    with pytest.raises(NotImplementedError, match=r"8\.0.*Hopper"):
        gpu.open_pool(*arguments(shape)[:2])


def test_few_rows_are_split_and_many_are_not() -> None:
    assert gpu.count_splits(8, 32768) == 33, "8 programs make 264, which fill the SMs twice"
    assert gpu.count_splits(8, 1024) == 4, "a split has at least 4 blocks of 64 keys"
    assert gpu.count_splits(1, 8) == gpu.count_splits(512, 32768) == 1


def test_splits_share_all_blocks_of_a_row_and_none_twice() -> None:
    for length, window in [(0, None), (1, None), (64, None), (1000, None), (1000, 100), (1000, 999), (65, 1)]:
        static = gpu.Call(1, 8, 64, 64, False, window, 1.0, None, False)
        spans = [gpu._span(static, jnp.int32(length), jnp.int32(split), 5) for split in range(5)]
        walked = [block for span in spans for block in range(int(span.first), int(span.last))]
        begin = 0 if window is None else max(0, length - window)
        assert walked == sorted({key // 64 for key in range(begin, length)})
