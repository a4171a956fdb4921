"""Cache writes on TPU, interpreted: the reference's result bit for bit, neighbours untouched, and no races."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.arrays import Int8Pages
from pallas_kernels.kv_write import reference, tpu
from pallas_kernels.kv_write.shapes import SHAPES, Shape
from pallas_kernels.pages import quantise

from .mosaic_tpu import DTYPES, run_without_races
from .test_kv_write import make_call


def stored_as(call: tuple[Any, ...], dtype: str) -> tuple[Any, ...]:
    """The call with a pool of `dtype`, all of it NaN but whole numbers: a slot that is not written must stay so."""
    pool, *rest = call
    if dtype == "int8":
        numbers, scales = jax.jit(quantise)(pool)
        return (Int8Pages(numbers, jnp.full_like(scales, jnp.nan)), *rest)
    return (jnp.full_like(pool, jnp.nan, dtype), *rest)


def bits(pages: Any) -> Any:
    """NaN is not NaN, but its bits are."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).view(f"u{leaf.dtype.itemsize}"), pages)


def check(call: tuple[Any, ...]) -> None:
    expected = bits(jax.jit(reference.kv_write)(*call))
    got = run_without_races(lambda form, *call: bits(form(*call)), tpu.kv_write, *call)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


SMALL = {
    "decode, more rows than slots": (Shape(1, 1, 0, 1, 4, 16), [1, 0, 1, 1] * 10, [0, 0, 23, 15] * 10),
    "chunks, more groups than slots": (Shape(1, 150, 0, 1, 4, 32), [150, 5, 0, 1], [3, 22, 0, 31]),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("decode, more rows than slots", "float32"),
        ("decode, more rows than slots", "int8"),
        ("chunks, more groups than slots", "bfloat16"),
    ],
)
def test_small_writes_equal_the_reference(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With four items on their way at most, so that each slot is used again and again."""
    monkeypatch.setattr(tpu, "_MOST_SLOTS", 4)
    check(stored_as(make_call(*SMALL[name]), dtype))


@pytest.mark.parametrize(("name", "dtype"), [(name, DTYPES[i % 3]) for i, name in enumerate(SHAPES)])
def test_real_writes_equal_the_reference(name: str, dtype: str) -> None:
    shape = SHAPES[name]
    counts = [shape.tokens - row % 2 for row in range(min(shape.rows, 3))]
    check(stored_as(make_call(shape, counts, [shape.start] * len(counts)), dtype))


@pytest.mark.parametrize(
    ("heads", "c", "rows", "tokens", "dtype", "reason"),
    [
        (256, 2_048, 1, 16, "float32", "a group of slots takes 33554432 bytes"),
        (1, 8, 64, 4_096, "float32", "64 rows of 513 groups of slots: at most 32768 groups fit in SMEM"),
        (1, 8, 1, 16, "float16", "pages of float16"),
    ],
)
def test_what_the_kernel_cannot_do_it_refuses(
    heads: int, c: int, rows: int, tokens: int, dtype: str, reason: str
) -> None:
    pool = jax.ShapeDtypeStruct((4, 2, heads, 16, c), jnp.dtype(dtype))
    new = jax.ShapeDtypeStruct((rows, tokens, heads, c), jnp.float32)
    where = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, 4), (rows, tokens))]
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(tpu.kv_write, pool, new, new, *where)
