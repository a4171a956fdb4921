"""Cache writes: only the slots that own the positions change, padding changes nothing, and the pool is not copied."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import reference, xla
from pallas_kernels.kv_write.shapes import SHAPES, Shape
from pallas_kernels.pages import quantise

FORMS = {"reference": reference.kv_write, "xla": xla.kv_write}


def make_call(shape: Shape, counts: list[int], starts: list[int], seed: int = 0) -> tuple[Any, ...]:
    """A pool full of numbers, and `counts[i]` fresh tokens for row i from starts[i] on; the rest is NaN padding."""
    random = np.random.default_rng(seed)
    rows, width = len(counts), -(-(max(starts) + shape.tokens) // shape.page_size) + 1
    pool = random.standard_normal((rows * width + 1, shape.planes, shape.kv_heads, shape.page_size, shape.head_dim))
    table = random.permutation(len(pool))[: rows * width].reshape(rows, width)
    positions = np.full((rows, shape.tokens), -1)
    fresh = np.full((shape.planes, rows, shape.tokens, shape.kv_heads, shape.head_dim), np.nan)
    for row, (count, start) in enumerate(zip(counts, starts, strict=True)):
        positions[row, :count] = np.arange(start, start + count)
        fresh[:, row, :count] = random.standard_normal((shape.planes, count, shape.kv_heads, shape.head_dim))
        unread = np.arange(width) * shape.page_size >= start + count
        table[row, unread] = random.choice([-1, 0, len(pool), 2**30], unread.sum())
    keys, *values = fresh.astype(np.float32)
    return (
        pool.astype(np.float32),
        keys,
        values[0] if values else None,
        table.astype(np.int32),
        positions.astype(np.int32),
    )


def by_hand(pool: np.ndarray, keys: np.ndarray, values: np.ndarray, table: np.ndarray, positions: np.ndarray) -> Any:
    expected, size = pool.copy(), pool.shape[3]
    for row, token in np.argwhere(positions >= 0):
        page, slot = table[row, positions[row, token] // size], positions[row, token] % size
        for plane, fresh in enumerate((keys,) if values is None else (keys, values)):
            expected[page, plane, :, slot] = fresh[row, token]
    return expected


ROWS = {
    "decode": (Shape(1, 1, 0, 2, 4, 8), [1, 1, 0, 1], [0, 23, 0, 8]),
    "whole pages": (Shape(1, 16, 0, 2, 4, 8), [16], [8]),
    "across pages, padded": (Shape(1, 16, 0, 2, 4, 8), [16, 5, 0, 1], [3, 6, 0, 15]),
    "two tokens": (Shape(1, 2, 0, 2, 4, 8), [2, 2, 1], [7, 0, 9]),
    "one plane": (Shape(1, 16, 0, 1, 4, 8, planes=1), [16, 5, 0, 1], [3, 6, 0, 15]),
    "one plane, decode": (Shape(1, 1, 0, 1, 4, 8, planes=1), [1, 1, 0, 1], [0, 23, 0, 8]),
    "all padding": (Shape(1, 16, 0, 2, 4, 8), [0, 0], [0, 0]),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("form", FORMS)
def test_writes_the_owning_slots_and_no_other(form: str, name: str) -> None:
    call = make_call(*ROWS[name])
    got = jax.jit(FORMS[form])(*jax.tree.map(jnp.asarray, call))
    np.testing.assert_array_equal(np.asarray(got), by_hand(*call))


@pytest.mark.parametrize("name", SHAPES)
def test_xla_equals_the_reference_on_real_shapes(name: str) -> None:
    shape = SHAPES[name]
    counts = [shape.tokens - row % 2 for row in range(min(shape.rows, 3))]
    call = make_call(shape, counts, [shape.start] * len(counts))
    got = jax.jit(xla.kv_write)(*jax.tree.map(jnp.asarray, call))
    np.testing.assert_array_equal(np.asarray(got), by_hand(*call))


@pytest.mark.parametrize("name", ["smollm2-135m decode 32", "smollm2-135m prefill 512"])
def test_the_pool_is_donated_and_not_copied(name: str) -> None:
    shape = SHAPES[name]
    call = make_call(shape, [shape.tokens] * shape.rows, [shape.start] * shape.rows)
    pool, *rest = map(jnp.asarray, call)
    pool = jnp.concatenate([pool] * 8)
    compiled = jax.jit(xla.kv_write, donate_argnums=0).lower(pool, *rest).compile()
    size, analysis = pool.nbytes, compiled.memory_analysis()
    compiled(pool, *rest).block_until_ready()
    assert pool.is_deleted()
    assert analysis.alias_size_in_bytes == size
    assert analysis.temp_size_in_bytes < size / 4


def test_values_are_stored_in_the_pools_dtype() -> None:
    pool, *rest = map(jnp.asarray, make_call(*ROWS["across pages, padded"]))
    for form in FORMS.values():
        written = jax.jit(form)(pool.astype(jnp.bfloat16), *rest)
        assert written.dtype == jnp.bfloat16
        np.testing.assert_array_equal(written, by_hand(*map(np.asarray, (pool.astype(jnp.bfloat16), *rest))))


@pytest.mark.parametrize("name", ["decode", "across pages, padded", "one plane"])
@pytest.mark.parametrize("form", FORMS)
def test_an_int8_pool_gets_numbers_and_scales_in_the_owning_slots_and_no_other(form: str, name: str) -> None:
    pool, keys, values, *where = make_call(*ROWS[name])
    pages = jax.jit(quantise)(pool)
    got = jax.jit(FORMS[form])(pages, keys, values, *where)
    fresh = jax.jit(quantise)(keys), values if values is None else jax.jit(quantise)(values)
    for i, leaf in enumerate(got):
        expected = by_hand(np.asarray(pages[i]), np.asarray(fresh[0][i]), fresh[1] and np.asarray(fresh[1][i]), *where)
        assert leaf.dtype == pages[i].dtype
        np.testing.assert_array_equal(np.asarray(leaf), expected)


@pytest.mark.parametrize("tokens", [1, 100])
def test_an_int8_pool_is_donated_and_not_copied(tokens: int) -> None:
    pool, *rest = make_call(Shape(1, tokens, 0, 2, 64, 16), [tokens], [40])
    pages = quantise(jnp.concatenate([jnp.asarray(pool)] * 40))
    size = sum(leaf.nbytes for leaf in pages)
    compiled = jax.jit(xla.kv_write, donate_argnums=0).lower(pages, *rest).compile()
    compiled(pages, *rest)
    assert all(leaf.is_deleted() for leaf in pages)
    assert compiled.memory_analysis().alias_size_in_bytes == size
    assert compiled.memory_analysis().temp_size_in_bytes < size / 4
