"""The TPU's decode kernel, interpreted, is the reference; real compiles for each TPU are in tests/tpu_aot."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tpu_pages
from pallas_kernels.paged_decode_attention import reference, tpu
from pallas_kernels.paged_decode_attention.shapes import SHAPES, Shape
from pallas_kernels.pages import empty_pages

from .attention_cases import ROUNDED, Case, in_dtype, make_case, run_decode
from .mosaic_tpu import DTYPES, INTERPRET, run_without_races

run_kernel = partial(run_without_races, run_decode, tpu.paged_decode_attention)
run_reference = partial(run_decode, reference.paged_decode_attention)

SMALL = {
    "rows of every length, an odd number": (Shape(1, 1, 0, 2, 3, 8, 64), [1, 64, 0, 65, 300, 256, 0, 31, 257]),
    "one row, softcap, page of 8": (Shape(1, 1, 0, 1, 12, 8, 8, softcap=1.5), [140]),
    "no row with anything": (Shape(1, 1, 0, 1, 1, 8, 128), [0, 0, 0]),
    "window of 1": (Shape(1, 1, 0, 3, 4, 8, 64, window=1), [1, 64, 65, 300]),
    "window within a page, sinks": (Shape(1, 1, 0, 8, 1, 8, 128, window=5, sinks=True), [0, 130, 3]),
    "window of several blocks": (Shape(1, 1, 0, 1, 4, 8, 64, window=300), [500, 30]),
    "sinks, softcap": (Shape(1, 1, 0, 2, 2, 8, 64, softcap=1.5, sinks=True), [1, 70, 0, 300]),
    "one plane": (Shape(1, 1, 0, 1, 16, 24, 32, planes=1), [1, 300, 32, 0]),
    "one plane, window, page of two registers": (Shape(1, 1, 0, 1, 2, 8, 256, window=9, planes=1), [260, 100]),
}


@pytest.fixture
def blocks_of_128(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few keys are several blocks, which takes few copies to interpret."""
    monkeypatch.setattr(tpu, "TOKENS", (128,))


def check(case: Case, shape: Shape, tolerance: float = 1e-5) -> None:
    expected, got = (np.asarray(run(case, shape), np.float32) for run in (run_reference, run_kernel))
    np.testing.assert_allclose(got, expected, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.usefixtures("blocks_of_128")
@pytest.mark.parametrize("name", SMALL)
def test_each_row_is_the_references(name: str) -> None:
    shape, lengths = SMALL[name]
    check(make_case(shape, lengths), shape)


REAL = {replace(shape, rows=2): name for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [pytest.param(shape, DTYPES[i % 3], id=f"{name}, {DTYPES[i % 3]}") for i, (shape, name) in enumerate(REAL.items())],
)
def test_real_shapes_are_the_references(shape: Shape, dtype: str) -> None:
    """With two heads, in blocks as large as they make them: the others do the same."""
    shape = replace(shape, kv_heads=min(shape.kv_heads, 2))
    case, wide = in_dtype(make_case(shape, [shape.length // 3, shape.length]), dtype)
    expected, got = (np.asarray(x, np.float32) for x in (run_reference(wide, shape), run_kernel(case, shape)))
    np.testing.assert_allclose(got, expected, *((1e-4, 1e-5) if dtype == "float32" else ROUNDED))


@pytest.mark.usefixtures("blocks_of_128")
def test_two_cores_share_the_rows_without_a_race() -> None:
    shape = Shape(1, 1, 0, 1, 2, 8, 64)
    case = make_case(shape, [70, 0, 300, 64, 5])
    form = partial(tpu.paged_decode_attention, interpret=replace(INTERPRET, num_cores_or_threads=2))
    got = run_without_races(run_decode, lambda *args, interpret, **how: form(*args, **how), case, shape)
    np.testing.assert_allclose(got, run_reference(case, shape), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("blocks_of_128")
def test_pages_before_the_window_are_not_fetched() -> None:
    """Their table entries are nonsense, which the interpreter would trip over."""
    shape = Shape(1, 1, 0, 1, 1, 8, 32, window=150)
    case = make_case(shape, [100, 300])
    expected = run_reference(case, shape)
    for row, length in enumerate(case.lengths):
        case.page_table[row, : max(0, length - 150) // 32] = 2**30
    np.testing.assert_allclose(run_kernel(case, shape), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("blocks_of_128")
@pytest.mark.parametrize(("shape", "lengths"), [SMALL["window of 1"], SMALL["one plane"]], ids=["window", "one plane"])
def test_int8_pages_are_met_as_the_numbers_they_stand_for(shape: Shape, lengths: list[int]) -> None:
    """NaN stands in the scales of what nobody may see."""
    case, wide = in_dtype(make_case(shape, lengths), "int8")
    assert np.isnan(case.pages.scales).any()
    expected, got = (
        np.asarray(run(some, shape), np.float32) for run, some in ((run_reference, wide), (run_kernel, case))
    )
    np.testing.assert_allclose(got, expected, *ROUNDED)


@pytest.mark.usefixtures("blocks_of_128")
@pytest.mark.parametrize("name", ["rows of every length, an odd number"])
def test_bfloat16_pages_are_met_within_a_rounding(name: str) -> None:
    shape, lengths = SMALL[name]
    case, _ = in_dtype(make_case(shape, lengths), "bfloat16")
    check(case, shape, 2**-8)


@pytest.mark.usefixtures("blocks_of_128")
def test_a_row_is_bitwise_the_same_whatever_its_neighbours() -> None:
    shape = Shape(1, 1, 0, 3, 3, 8, 128)
    case = make_case(shape, [300, 40, 0, 500, 64])
    alone = case._replace(queries=case.queries[:1], page_table=case.page_table[:1], lengths=case.lengths[:1])
    np.testing.assert_array_equal(run_kernel(alone, shape)[0], run_kernel(case, shape)[0])


@pytest.mark.usefixtures("blocks_of_128")
def test_a_broken_row_reaches_no_other() -> None:
    """Row 0 goes first and leaves NaN in both rooms, where the pages of shorter rows then stand before it."""
    shape = Shape(1, 1, 0, 1, 2, 8, 64)
    case = make_case(shape, [500, 30, 200, 64])
    expected = run_reference(case, shape)
    case.pages[case.page_table[0, :8], 1] = np.nan
    got = run_kernel(case, shape)
    assert np.isnan(got[0]).all()
    np.testing.assert_allclose(got[1:], expected[1:], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("blocks_of_128")
def test_rows_whose_page_tables_do_not_fit_at_once_go_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(1, 1, 0, 1, 1, 8, 128)
    case = make_case(shape, [200, 7, 0, 60, 133])
    monkeypatch.setattr(tpu_pages, "TABLE_BYTES", 2 * 4 * case.page_table.shape[1])
    assert str(jax.make_jaxpr(partial(run_decode_traced, shape))(case)).count("pallas_call[") == 3
    check(case, shape)


def run_decode_traced(shape: Shape, case: Case) -> jax.Array:
    how = {"window": shape.window, "scale": 1.0, "softcap": shape.softcap}
    return tpu.paged_decode_attention(case.queries[:, 0], case.pages, case.page_table, case.lengths, **how)


POOLS = {
    "few heads": ((2, 1, 64, 128), jnp.bfloat16, 99, None, 16),
    "many heads": ((2, 8, 64, 128), jnp.bfloat16, 99, None, 4),
    "very many, wide numbers": ((2, 32, 64, 80), jnp.float32, 99, None, 2),
    "padded to 128 lanes": ((2, 8, 64, 64), jnp.bfloat16, 99, None, 4),
    "int8": ((2, 8, 64, 128), jnp.int8, 99, None, 8),
    "small pages": ((2, 1, 8, 128), jnp.bfloat16, 99, None, 16),
    "large pages": ((2, 8, 1024, 128), jnp.bfloat16, 99, None, 1),
    "a narrow table": ((2, 1, 64, 128), jnp.bfloat16, 5, None, 4),
    "a window": ((2, 1, 64, 128), jnp.bfloat16, 99, 130, 4),
    "a window, a page of one block": ((2, 1, 128, 128), jnp.bfloat16, 99, 1, 1),
}


@pytest.mark.parametrize("name", POOLS)
def test_a_block_is_as_large_as_pays_and_fits(name: str) -> None:
    shape, dtype, width, window, expected = POOLS[name]
    pages = jax.eval_shape(lambda: empty_pages((100, *shape), dtype))
    assert tpu._pages_together(pages, width, window) == expected


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_rows_are_dealt_out_evenly_and_each_once(rows: int) -> None:
    lengths = np.random.default_rng(rows).integers(0, 6, rows).astype(np.int32)
    plan = tpu.Plan(rows, 1, 1, 1, 1, None, 1.0, None)
    order, ends = (np.asarray(x) for x in tpu._deal(plan, jnp.asarray(lengths)))
    assert sorted(order[:rows]) == list(range(rows))
    np.testing.assert_array_equal(ends[:rows], lengths[order[:rows]])
    halves = ends.reshape(plan.halves, plan.steps)
    assert (np.diff(halves, axis=1) <= 0).all()
    assert np.ptp(halves.sum(axis=1)) <= lengths.max(initial=0)
    if len(order) > rows:  # the place left over repeats its neighbour, so that no block is written twice
        assert (order[-1], ends[-1]) == (order[-2], 0)


def trace(page_size: int, heads: int, width: int, of: str = "float32", stored: str = "float32") -> None:
    queries, pages = jnp.zeros((2, heads, 1, 8), of), jnp.zeros((3, 2, heads, page_size, 8), stored)
    table, lengths = jnp.zeros((2, width), jnp.int32), jnp.ones(2, jnp.int32)
    tpu.paged_decode_attention(queries, pages, table, lengths, window=None, scale=1.0, softcap=None)


@pytest.mark.parametrize(
    ("page_size", "heads", "width", "reason"),
    [(24, 1, 4, "24 tokens"), (4, 1, 4, "of 4"), (16, 1, 2**18, "SMEM"), (16, 64, 4, "VMEM"), (8192, 1, 4, "VMEM")],
)
def test_what_the_kernel_cannot_do_it_says(page_size: int, heads: int, width: int, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        trace(page_size, heads, width)


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_float16_is_refused(stored: str) -> None:
    """The compiler would refuse it only when the step is compiled, where no other form can stand in."""
    with pytest.raises(NotImplementedError, match="queries of float16"):
        trace(16, 1, 4, "float16", stored)
    with pytest.raises(NotImplementedError, match="pages of float16"):
        trace(16, 1, 4, "bfloat16", "float16")
