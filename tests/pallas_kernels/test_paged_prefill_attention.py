"""Paged prefill attention: the plain forms against a loop in numpy and each other, NaN in every slot nobody reads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from pallas_kernels.paged_prefill_attention import reference, xla
from pallas_kernels.paged_prefill_attention.shapes import SHAPES, Shape
from pallas_kernels.pages import quantise

from .attention_cases import by_hand, how, in_int8, make_case, run_prefill

FORMS = [reference.paged_prefill_attention, xla.paged_prefill_attention]
checked_reference = jaxtyped(typechecker=beartype)(reference.paged_prefill_attention)

SMALL = {
    "plain": (Shape(1, 20, 0, 2, 2, 8, 8), [20, 7, 0, 43]),
    "one query": (Shape(1, 1, 0, 2, 2, 8, 8), [20, 7, 0, 43]),
    "window": (Shape(1, 20, 0, 2, 2, 8, 8, window=6), [20, 7, 0, 43]),
    "sinks": (Shape(1, 20, 0, 2, 2, 8, 8, sinks=True), [20, 7, 0, 43]),
    "sinks, window, softcap": (Shape(1, 20, 0, 2, 2, 8, 8, 6, 1.5, sinks=True), [20, 7, 0, 43]),
    "one plane": (Shape(1, 20, 0, 1, 2, 8, 8, planes=1), [20, 7, 0, 43]),
    "several strips": (Shape(1, 150, 0, 1, 2, 8, 16, softcap=5.0), [150, 201]),
    "several strips, window": (Shape(1, 150, 0, 1, 2, 8, 16, window=33), [150, 201]),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("form", FORMS, ids=["reference", "xla"])
def test_each_query_is_its_definition(form: Any, name: str) -> None:
    shape, lengths = SMALL[name]
    case = make_case(shape, lengths)
    mixed = run_prefill(form, case, shape)
    assert np.isfinite(mixed).all(), "a padding query, or one that met a NaN"
    for row, token in np.argwhere(case.positions >= 0)[::7]:
        head, query = row % shape.kv_heads, (row + token // 3) % shape.group
        expected = by_hand(case, shape, row, token, head, query)
        np.testing.assert_allclose(mixed[row, token, head, query], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_xla_equals_the_reference_on_real_shapes(name: str) -> None:
    shape = SHAPES[name]
    case = make_case(shape, [shape.length] if shape.rows == 1 else [shape.length // 3, shape.length])
    expected, got = (run_prefill(form, case, shape) for form in FORMS)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_the_reference_takes_the_shapes_it_declares() -> None:
    shape, lengths = SMALL["window"]
    case = jax.tree.map(jnp.asarray, make_case(shape, lengths))
    assert checked_reference(*case[:-1], **how(shape)).shape == case.queries.shape
    with pytest.raises(Exception, match="lengths"):
        checked_reference(*case._replace(lengths=case.lengths[1:])[:-1], **how(shape))
    with pytest.raises(Exception, match="sinks"):
        checked_reference(*case[:-1], **how(shape), sinks=jnp.zeros((2, 3)))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("start", [0, 48, 53, 300], ids=["first", "on a page", "inside a page", "far"])
def test_a_query_is_the_same_wherever_its_chunk_starts(start: int, window: int | None) -> None:
    """As after a prefix hit: a chunk of two strips and a piece gives what all of the queries together give."""
    shape = Shape(1, 600, 0, 1, 2, 16, 16, window=window)
    case = make_case(shape, [600])
    at = slice(start, start + 300)
    part = case._replace(queries=case.queries[:, at], positions=case.positions[:, at], lengths=np.array([start + 300]))
    expected = run_prefill(reference.paged_prefill_attention, case, shape)[:, at]
    got = run_prefill(xla.paged_prefill_attention, part, shape)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_chunk_is_bitwise_the_same_wherever_its_pages_lie() -> None:
    shape = Shape(1, 256, 0, 1, 2, 16, 16)
    one = make_case(shape, [512])
    moved = np.random.default_rng(5).permutation(len(one.pages)).astype(np.int32)
    pages = np.empty_like(one.pages)
    pages[moved] = one.pages
    other = one._replace(pages=pages, page_table=moved[np.clip(one.page_table, 0, len(moved) - 1)])
    got, expected = (run_prefill(xla.paged_prefill_attention, case, shape) for case in (other, one))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["window", "one plane", "sinks, window, softcap", "plain"])
def test_int8_pages_are_met_as_the_numbers_they_stand_for(name: str) -> None:
    """NaN stands in the scales of what nobody may see."""
    shape, lengths = SMALL[name]
    case, wide = in_int8(make_case(shape, lengths))
    assert np.isnan(case.pages.scales).any()
    expected = run_prefill(reference.paged_prefill_attention, wide, shape)
    assert np.isfinite(expected).all()
    for form in FORMS:
        got = run_prefill(form, case, shape)
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)  # padding queries give zeros


def test_int8_pages_become_float32_page_by_page() -> None:
    shape = Shape(1, 64, 256, 2, 2, 64, 16)
    case = make_case(shape, [shape.length])
    pages = jnp.concatenate([jnp.asarray(case.pages)] * 64)
    attend = jax.jit(lambda pages, *rest: xla.paged_prefill_attention(case.queries, pages, *rest, **how(shape)))
    compiled = attend.lower(quantise(pages), case.page_table, case.positions, case.lengths).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pages.nbytes / 8
