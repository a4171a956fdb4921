"""The TPU's prefill kernel, interpreted, is the reference; real compiles for each TPU are in tests/tpu_aot."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_prefill_attention import reference, tpu
from pallas_kernels.paged_prefill_attention.shapes import SHAPES, Shape
from pallas_kernels.pages import quantise

from .attention_cases import Case, how, in_int8, make_case, run_prefill
from .mosaic_tpu import INTERPRET, run_without_races

run_kernel = partial(run_without_races, run_prefill, tpu.paged_prefill_attention)
run_reference = partial(run_prefill, reference.paged_prefill_attention)

SMALL = {
    "rows of every length": (Shape(1, 20, 0, 2, 2, 8, 16), [20, 7, 0, 43]),
    "window within a page": (Shape(1, 20, 0, 1, 3, 8, 32, window=6), [0, 43, 20]),
    "window of pages, rooms past it": (Shape(1, 16, 0, 1, 1, 8, 128, window=300), [1100]),
    "softcap, sinks, three heads": (Shape(1, 9, 0, 3, 2, 8, 64, softcap=1.5, sinks=True), [70, 3]),
    "one plane, heads in two programs": (Shape(1, 5, 0, 1, 34, 16, 16, planes=1, sinks=True), [21, 5]),
    "several blocks of queries": (Shape(1, 40, 0, 1, 16, 8, 64), [40, 0, 17]),
}


def check(case: Case, shape: Shape, tolerance: float = 1e-5) -> None:
    expected, got = (np.asarray(run(case, shape), np.float32) for run in (run_reference, run_kernel))
    np.testing.assert_allclose(got, expected, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("name", SMALL)
def test_each_row_is_the_references_and_padding_is_zero(name: str) -> None:
    shape, lengths = SMALL[name]
    check(make_case(shape, lengths), shape)


@pytest.mark.parametrize("name", SHAPES)
def test_real_shapes_are_the_references(name: str) -> None:
    """With one key head: several are in the small cases, and the interpreter is slow."""
    shape = replace(SHAPES[name], kv_heads=1)
    check(make_case(shape, [shape.length]), shape, 1e-4)


def test_a_query_is_the_same_wherever_its_chunk_starts() -> None:
    """Here far behind the first key, inside a page."""
    shape = Shape(1, 200, 0, 1, 2, 8, 16, window=100)
    case = make_case(shape, [200])
    at = slice(150, 190)
    part = case._replace(queries=case.queries[:, at], positions=case.positions[:, at], lengths=np.array([190]))
    np.testing.assert_allclose(run_kernel(part, shape), run_reference(case, shape)[:, at], rtol=1e-4, atol=1e-5)


def test_two_cores_share_the_heads_without_a_race() -> None:
    shape = Shape(1, 5, 0, 1, 34, 8, 16, planes=1)
    case = make_case(shape, [21, 0, 5])
    form = partial(tpu.paged_prefill_attention, interpret=replace(INTERPRET, num_cores_or_threads=2))
    got = run_without_races(run_prefill, lambda *args, interpret, **how: form(*args, **how), case, shape)
    np.testing.assert_allclose(got, run_reference(case, shape), rtol=1e-4, atol=1e-5)


def test_pages_before_the_window_are_not_fetched() -> None:
    """Their table entries are nonsense, which the interpreter would trip over."""
    shape = Shape(1, 8, 0, 1, 1, 8, 16, window=20)
    case = make_case(shape, [100])
    expected = run_reference(case, shape)
    case.page_table[0, : (100 - 8 - 20 + 1) // 16] = 2**30
    np.testing.assert_allclose(run_kernel(case, shape), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("planes", "window"), [(2, 5), (1, None)])
def test_int8_pages_are_met_as_the_numbers_they_stand_for(planes: int, window: int | None) -> None:
    """NaN stands in the scales of what nobody may see."""
    shape = Shape(1, 12, 0, 2, 2, 8, 16, window=window, planes=planes)
    case, wide = in_int8(make_case(shape, [30, 7]))
    assert np.isnan(case.pages.scales).any()
    np.testing.assert_allclose(run_kernel(case, shape), run_reference(wide, shape), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("quantised", [False, True], ids=["bfloat16 pages", "int8 pages"])
def test_bfloat16_queries_are_met_in_bfloat16(quantised: bool) -> None:
    """Weights are rounded to 8 bits before they meet values of size 1, and the result once more."""
    shape = Shape(1, 20, 0, 2, 2, 64, 16, softcap=3.0)
    case = make_case(shape, [50, 20])
    pages = jax.jit(quantise)(case.pages) if quantised else jnp.asarray(case.pages, jnp.bfloat16)
    case = case._replace(queries=jnp.asarray(case.queries, jnp.bfloat16), pages=pages)
    assert run_kernel(case, shape).dtype == jnp.bfloat16
    check(case, shape, 1e-2)


def test_a_broken_row_breaks_no_other() -> None:
    """NaN that one row left in a room is not met by the next, which fills less of it."""
    shape = Shape(1, 4, 0, 1, 1, 8, 16)
    case = make_case(shape, [100, 9, 100])
    expected = run_reference(case, shape)
    for row in (0, 2):
        case.pages[case.page_table[row, :6]] = np.nan
    got = run_kernel(case, shape)
    assert np.isnan(got[[0, 2]]).all()
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-4, atol=1e-5)


def test_what_the_kernel_cannot_do_it_refuses() -> None:
    def trace(shape: Shape, **changed: Any) -> None:
        case = jax.tree.map(jnp.asarray, make_case(shape, [5]))
        jax.eval_shape(partial(tpu.paged_prefill_attention, **(how(shape) | changed)), *case[:-1])

    with pytest.raises(NotImplementedError, match="pages of 24 tokens"):
        trace(Shape(1, 5, 0, 1, 1, 8, 24))
    with pytest.raises(NotImplementedError, match="scale of 0"):
        trace(Shape(1, 5, 0, 1, 1, 8, 16), scale=0.0)
