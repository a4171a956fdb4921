"""Paged attention: both forms against a loop in numpy and each other, with NaN in every slot that nobody reads."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from pallas_kernels.paged_attention import reference, xla
from pallas_kernels.paged_attention.shapes import SHAPES, Shape
from pallas_kernels.pages import as_float32, quantise

FORMS = [reference.paged_attention, xla.paged_attention]
checked_reference = jaxtyped(typechecker=beartype)(reference.paged_attention)


class Case(NamedTuple):
    queries: Any
    pages: Any
    page_table: Any
    positions: Any
    lengths: Any
    sinks: Any = None


def make_case(shape: Shape, lengths: list[int], seed: int = 0) -> Case:
    """Row i runs up to `shape.tokens` queries ending at lengths[i].

    Every slot that no query of the case may see is NaN, and every table entry past a length is nonsense.
    """
    random = np.random.default_rng(seed)
    rows, width, size = len(lengths), -(-max(lengths) // shape.page_size) + 1, shape.page_size
    count = rows * width + 3
    pages = np.full((count, shape.planes, shape.kv_heads, size, shape.head_dim), np.nan, np.float32)
    table = random.permutation(count)[: rows * width].reshape(rows, width).astype(np.int32)
    positions = np.full((rows, shape.tokens), -1, np.int32)
    for row, length in enumerate(lengths):
        tokens = min(shape.tokens, length)
        positions[row, :tokens] = np.arange(length - tokens, length)
        first = 0 if shape.window is None else max(0, length - tokens - shape.window + 1)
        for key in range(first if tokens else length, length):
            fresh = random.standard_normal((shape.planes, shape.kv_heads, shape.head_dim))
            pages[table[row, key // size], :, :, key % size] = fresh
        unread = np.arange(width) * size >= length
        table[row, unread] = random.choice([-7, -1, 0, count - 1, count, 2**30], unread.sum())
    queries = random.standard_normal((rows, shape.tokens, shape.kv_heads, shape.group, shape.head_dim))
    sinks = random.uniform(-3, 3, (shape.kv_heads, shape.group)).astype(np.float32) if shape.sinks else None
    return Case(queries.astype(np.float32), pages, table, positions, np.asarray(lengths, np.int32), sinks)


def run(form: Any, case: Case, shape: Shape) -> np.ndarray:
    how = {"window": shape.window, "scale": shape.head_dim**-0.5, "softcap": shape.softcap}
    case = jax.tree.map(jnp.asarray, case)
    return np.asarray(jax.jit(lambda *arrays, sinks: form(*arrays, **how, sinks=sinks))(*case[:-1], sinks=case.sinks))


def by_hand(case: Case, shape: Shape, row: int, token: int, head: int, query: int) -> np.ndarray:
    """One head of one query in float64, from the definition."""
    position = int(case.positions[row, token])
    first = 0 if shape.window is None else max(0, position - shape.window + 1)
    slots = [
        (case.page_table[row, key // shape.page_size], key % shape.page_size) for key in range(first, position + 1)
    ]
    keys, values = (np.array([case.pages[page, i, head, slot] for page, slot in slots], np.float64) for i in (0, -1))
    scores = keys @ case.queries[row, token, head, query].astype(np.float64) * shape.head_dim**-0.5
    if shape.softcap is not None:
        scores = shape.softcap * np.tanh(scores / shape.softcap)
    sink = -np.inf if case.sinks is None else float(case.sinks[head, query])
    peak = max(sink, scores.max())
    weights = np.exp(scores - peak)
    return weights / (weights.sum() + np.exp(sink - peak)) @ values


SMALL = {
    "decode": (Shape(1, 1, 0, 2, 3, 8, 8), [1, 24, 7, 0, 8, 9, 23, 16, 2, 17, 11]),
    "decode, window": (Shape(1, 1, 0, 2, 3, 8, 8, window=5), [1, 24, 7, 0, 8, 9, 23, 16, 2, 17, 11]),
    "decode, window of 1": (Shape(1, 1, 0, 1, 1, 8, 8, window=1), [1, 24, 17]),
    "decode, softcap": (Shape(1, 1, 0, 2, 2, 8, 8, softcap=1.5), [24, 9]),
    "decode, sinks": (Shape(1, 1, 0, 2, 3, 8, 8, sinks=True), [1, 24, 7, 0, 8, 9, 23, 16, 2, 17, 11]),
    "decode, sinks, window, softcap": (Shape(1, 1, 0, 2, 3, 8, 8, 5, 1.5, sinks=True), [1, 24, 7, 0]),
    "decode, one plane": (Shape(1, 1, 0, 1, 3, 8, 8, planes=1), [1, 24, 7, 0, 8, 9]),
    "prefill": (Shape(1, 20, 0, 2, 2, 8, 8), [20, 7, 0, 43]),
    "prefill, window": (Shape(1, 20, 0, 2, 2, 8, 8, window=6), [20, 7, 0, 43]),
    "prefill, sinks": (Shape(1, 20, 0, 2, 2, 8, 8, sinks=True), [20, 7, 0, 43]),
    "prefill, sinks, window, softcap": (Shape(1, 20, 0, 2, 2, 8, 8, 6, 1.5, sinks=True), [20, 7, 0, 43]),
    "prefill, one plane": (Shape(1, 20, 0, 1, 2, 8, 8, planes=1), [20, 7, 0, 43]),
    "prefill of several strips": (Shape(1, 150, 0, 1, 2, 8, 16, softcap=5.0), [150, 201]),
    "prefill of several strips, window": (Shape(1, 150, 0, 1, 2, 8, 16, window=33), [150, 201]),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("form", FORMS, ids=["reference", "xla"])
def test_each_query_is_its_definition(form: Any, name: str) -> None:
    shape, lengths = SMALL[name]
    case = make_case(shape, lengths)
    mixed = run(form, case, shape)
    assert np.isfinite(mixed).all(), "a padding query, or one that met a NaN"
    for row, token in np.argwhere(case.positions >= 0)[::7]:
        head, query = row % shape.kv_heads, (row + token // 3) % shape.group
        expected = by_hand(case, shape, row, token, head, query)
        np.testing.assert_allclose(mixed[row, token, head, query], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_xla_equals_the_reference_on_real_shapes(name: str) -> None:
    shape = SHAPES[name]
    case = make_case(shape, [shape.length] if shape.rows == 1 else [shape.length // 3, shape.length])
    real = case.positions >= 0
    expected, got = run(reference.paged_attention, case, shape), run(xla.paged_attention, case, shape)
    np.testing.assert_allclose(got[real], expected[real], rtol=1e-4, atol=1e-5)


def test_the_reference_takes_the_shapes_it_declares() -> None:
    shape, lengths = SMALL["prefill, window"]
    case = jax.tree.map(jnp.asarray, make_case(shape, lengths))
    how = {"window": 6, "scale": 1.0, "softcap": None}
    assert checked_reference(*case[:-1], **how).shape == case.queries.shape
    with pytest.raises(Exception, match="lengths"):
        checked_reference(*case._replace(lengths=case.lengths[1:])[:-1], **how)
    with pytest.raises(Exception, match="sinks"):
        checked_reference(*case[:-1], **how, sinks=jnp.zeros((2, 3)))


def test_a_row_is_bitwise_the_same_whatever_its_neighbours() -> None:
    shape = Shape(1, 1, 0, 3, 3, 64, 16)
    case = make_case(shape, [40] * 16)
    alone = run(xla.paged_attention, case, shape)
    mixed = case._replace(lengths=np.where(np.arange(16) == 5, 40, 1 + np.arange(16)).astype(np.int32))
    mixed = mixed._replace(positions=mixed.lengths[:, None] - 1)
    np.testing.assert_array_equal(run(xla.paged_attention, mixed, shape)[5], alone[5])


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("start", [0, 48, 53, 300], ids=["first", "on a page", "inside a page", "far"])
def test_a_query_is_the_same_wherever_its_chunk_starts(start: int, window: int | None) -> None:
    """As after a prefix hit: a chunk of two strips and a piece gives what all of the queries together give."""
    shape = Shape(1, 600, 0, 1, 2, 16, 16, window=window)
    case = make_case(shape, [600])
    at = slice(start, start + 300)
    part = case._replace(queries=case.queries[:, at], positions=case.positions[:, at], lengths=np.array([start + 300]))
    expected = run(reference.paged_attention, case, shape)[:, at]
    np.testing.assert_allclose(run(xla.paged_attention, part, shape), expected, rtol=1e-4, atol=1e-5)


def test_a_chunk_is_bitwise_the_same_wherever_its_pages_lie() -> None:
    shape = Shape(1, 256, 0, 1, 2, 16, 16)
    one = make_case(shape, [512])
    moved = np.random.default_rng(5).permutation(len(one.pages)).astype(np.int32)
    pages = np.empty_like(one.pages)
    pages[moved] = one.pages
    other = one._replace(pages=pages, page_table=moved[np.clip(one.page_table, 0, len(moved) - 1)])
    np.testing.assert_array_equal(run(xla.paged_attention, other, shape), run(xla.paged_attention, one, shape))


@pytest.mark.parametrize("name", ["decode, window", "decode, one plane", "prefill, sinks, window, softcap", "prefill"])
def test_int8_pages_are_met_as_the_numbers_they_stand_for(name: str) -> None:
    """NaN stands in the scales of what nobody may see."""
    shape, lengths = SMALL[name]
    case = make_case(shape, lengths)
    case = case._replace(pages=jax.jit(quantise)(case.pages))
    assert np.isnan(case.pages.scales).any()
    wide = case._replace(pages=jax.jit(as_float32)(case.pages))
    expected = run(reference.paged_attention, wide, shape)
    assert np.isfinite(expected).all()
    for form in FORMS:
        got = run(form, case, shape)
        assert np.isfinite(got).all()
        real = case.positions >= 0
        np.testing.assert_allclose(got[real], expected[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 8), (64, 1)])
def test_int8_pages_become_float32_page_by_page(tokens: int, rows: int) -> None:
    shape = Shape(rows, tokens, 256, 2, 2, 64, 16)
    case = make_case(shape, [shape.length] * rows)
    pages = jnp.concatenate([jnp.asarray(case.pages)] * (64 if rows == 1 else 16))
    how: Any = {"window": None, "scale": 1.0, "softcap": None}
    attend = jax.jit(lambda pages, *rest: xla.paged_attention(case.queries, pages, *rest, **how))
    compiled = attend.lower(quantise(pages), case.page_table, case.positions, case.lengths).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pages.nbytes / 8


def test_bfloat16_pages_are_met_in_float32() -> None:
    shape, lengths = SMALL["decode"]
    case = make_case(shape, lengths)
    rounded = case._replace(pages=jnp.asarray(case.pages, jnp.bfloat16))
    wide = case._replace(pages=np.asarray(rounded.pages.astype(jnp.float32)))
    got = run(xla.paged_attention, rounded, shape)
    np.testing.assert_allclose(got, run(xla.paged_attention, wide, shape), rtol=1e-6, atol=1e-6)
