"""Paged decode attention: the plain forms against a loop in numpy and each other, NaN in every slot nobody reads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from pallas_kernels.paged_decode_attention import reference, xla
from pallas_kernels.paged_decode_attention.shapes import SHAPES, Shape
from pallas_kernels.pages import quantise

from .attention_cases import by_hand, how, in_int8, make_case, run_decode

FORMS = [reference.paged_decode_attention, xla.paged_decode_attention]
checked_reference = jaxtyped(typechecker=beartype)(reference.paged_decode_attention)

SMALL = {
    "plain": (Shape(1, 1, 0, 2, 3, 8, 8), [1, 24, 7, 0, 8, 9, 23, 16, 2, 17, 11]),
    "window": (Shape(1, 1, 0, 2, 3, 8, 8, window=5), [1, 24, 7, 0, 8, 9, 23, 16, 2, 17, 11]),
    "window of 1": (Shape(1, 1, 0, 1, 1, 8, 8, window=1), [1, 24, 17]),
    "softcap": (Shape(1, 1, 0, 2, 2, 8, 8, softcap=1.5), [24, 9]),
    "sinks": (Shape(1, 1, 0, 2, 3, 8, 8, sinks=True), [1, 24, 7, 0, 8, 9, 23, 16, 2, 17, 11]),
    "sinks, window, softcap": (Shape(1, 1, 0, 2, 3, 8, 8, 5, 1.5, sinks=True), [1, 24, 7, 0]),
    "one plane": (Shape(1, 1, 0, 1, 3, 8, 8, planes=1), [1, 24, 7, 0, 8, 9]),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("form", FORMS, ids=["reference", "xla"])
def test_each_query_is_its_definition(form: Any, name: str) -> None:
    shape, lengths = SMALL[name]
    case = make_case(shape, lengths)
    mixed = run_decode(form, case, shape)
    assert np.isfinite(mixed).all(), "an empty row, or a query that met a NaN"
    assert not mixed[case.lengths == 0].any()
    for row in np.flatnonzero(case.lengths):
        head, query = row % shape.kv_heads, row % shape.group
        expected = by_hand(case, shape, row, 0, head, query)
        np.testing.assert_allclose(mixed[row, head, query], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_xla_equals_the_reference_on_real_shapes(name: str) -> None:
    shape = SHAPES[name]
    case = make_case(shape, [shape.length] if shape.rows == 1 else [shape.length // 3, shape.length])
    expected, got = (run_decode(form, case, shape) for form in FORMS)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_the_reference_takes_the_shapes_it_declares() -> None:
    shape, lengths = SMALL["window"]
    case = jax.tree.map(jnp.asarray, make_case(shape, lengths))
    arrays = (case.queries[:, 0], case.pages, case.page_table)
    assert checked_reference(*arrays, case.lengths, **how(shape)).shape == arrays[0].shape
    with pytest.raises(Exception, match="lengths"):
        checked_reference(*arrays, case.lengths[1:], **how(shape))
    with pytest.raises(Exception, match="sinks"):
        checked_reference(*arrays, case.lengths, **how(shape), sinks=jnp.zeros((3, 2)))


def test_a_row_is_bitwise_the_same_whatever_its_neighbours() -> None:
    shape = Shape(1, 1, 0, 3, 3, 64, 16)
    case = make_case(shape, [40] * 16)
    alone = run_decode(xla.paged_decode_attention, case, shape)
    mixed = case._replace(lengths=np.where(np.arange(16) == 5, 40, 1 + np.arange(16)).astype(np.int32))
    np.testing.assert_array_equal(run_decode(xla.paged_decode_attention, mixed, shape)[5], alone[5])


@pytest.mark.parametrize("name", ["window", "one plane", "sinks, window, softcap", "plain"])
def test_int8_pages_are_met_as_the_numbers_they_stand_for(name: str) -> None:
    """NaN stands in the scales of what nobody may see."""
    shape, lengths = SMALL[name]
    case, wide = in_int8(make_case(shape, lengths))
    assert np.isnan(case.pages.scales).any()
    expected = run_decode(reference.paged_decode_attention, wide, shape)
    assert np.isfinite(expected).all()
    for form in FORMS:
        np.testing.assert_allclose(run_decode(form, case, shape), expected, rtol=1e-4, atol=1e-5)


def test_int8_pages_become_float32_page_by_page() -> None:
    shape = Shape(8, 1, 256, 2, 2, 64, 16)
    case = make_case(shape, [shape.length] * shape.rows)
    pages = jnp.concatenate([jnp.asarray(case.pages)] * 16)
    attend = jax.jit(lambda pages, *rest: xla.paged_decode_attention(case.queries[:, 0], pages, *rest, **how(shape)))
    compiled = attend.lower(quantise(pages), case.page_table, case.lengths).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pages.nbytes / 8


def test_bfloat16_pages_are_met_in_float32() -> None:
    shape, lengths = SMALL["plain"]
    case = make_case(shape, lengths)
    rounded = case._replace(pages=jnp.asarray(case.pages, jnp.bfloat16))
    wide = case._replace(pages=np.asarray(rounded.pages.astype(jnp.float32)))
    got, expected = (run_decode(xla.paged_decode_attention, some, shape) for some in (rounded, wide))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
