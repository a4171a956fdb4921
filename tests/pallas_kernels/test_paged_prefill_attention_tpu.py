"""The TPU's prefill kernel, interpreted, is the reference; real compiles for each TPU are in tests/tpu_aot."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tpu_pages
from pallas_kernels.paged_prefill_attention import reference, tpu, tpu_blocks
from pallas_kernels.paged_prefill_attention.shapes import SHAPES, Shape
from pallas_kernels.pages import empty_pages, quantise

from .attention_cases import ROUNDED, Case, how, in_dtype, in_int8, make_case, run_prefill
from .mosaic_tpu import DTYPES, INTERPRET, run_without_races

run_kernel = partial(run_without_races, run_prefill, tpu.paged_prefill_attention)
run_reference = partial(run_prefill, reference.paged_prefill_attention)

SMALL = {
    "rows of every length": (Shape(1, 20, 0, 2, 2, 8, 16), [20, 7, 0, 43]),
    "window within a page": (Shape(1, 20, 0, 1, 3, 8, 32, window=6), [0, 43, 20]),
    "window of pages, rooms past it": (Shape(1, 16, 0, 1, 1, 8, 128, window=300), [1100]),
    "softcap, sinks, three heads": (Shape(1, 9, 0, 3, 2, 8, 64, softcap=1.5, sinks=True), [70, 3]),
    "window, sinks, two units of two heads": (Shape(1, 9, 0, 4, 2, 8, 64, window=30, sinks=True), [70, 3]),
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


@pytest.mark.parametrize(("name", "dtype"), [(name, DTYPES[i % 3]) for i, name in enumerate(SHAPES)])
def test_real_shapes_are_the_references(name: str, dtype: str) -> None:
    """With one key head: several are in the small cases, and the interpreter is slow."""
    shape = replace(SHAPES[name], kv_heads=1)
    case, wide = in_dtype(make_case(shape, [shape.length]), dtype)
    expected, got = (np.asarray(x, np.float32) for x in (run_reference(wide, shape), run_kernel(case, shape)))
    np.testing.assert_allclose(got, expected, *((1e-3, 1e-4) if dtype == "float32" else ROUNDED))


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


@pytest.mark.parametrize(("planes", "window", "heads"), [(2, 5, 2), (1, None, 4)])
def test_int8_pages_are_met_as_the_numbers_they_stand_for(planes: int, window: int | None, heads: int) -> None:
    """NaN stands in the scales of what nobody may see. Four heads are two units, each with scales of its own."""
    shape = Shape(1, 12, 0, heads, 2, 8, 16, window=window, planes=planes)
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


def test_rows_whose_page_tables_do_not_fit_at_once_go_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(1, 5, 0, 1, 2, 8, 64)
    case = make_case(shape, [20, 3, 0])
    monkeypatch.setattr(tpu_pages, "TABLE_BYTES", 2 * 4 * case.page_table.shape[1])
    traced = jax.make_jaxpr(partial(tpu.paged_prefill_attention, **how(shape)))(*jax.tree.map(jnp.asarray, case[:-1]))
    assert str(traced).count("pallas_call[") == 2
    check(case, shape)


TAKEN = {
    "llama3-8b": ((512, 8, 4, 128), "bfloat16", (2, 64), "bfloat16", (4, 128, 8)),
    "smollm2-135m": ((512, 3, 3, 64), "float32", (2, 64), "float32", (3, 160, 4)),
    "gemma2-9b": ((512, 8, 2, 256), "bfloat16", (2, 64), "bfloat16", (4, 256, 8)),
    "gemma2-9b, float32 queries": ((512, 8, 2, 256), "float32", (2, 64), "bfloat16", (2, 256, 4)),
    "gemma2-9b, float32 pages": ((512, 8, 2, 256), "bfloat16", (2, 64), "float32", (4, 256, 4)),
    "gemma2-9b, float32": ((512, 8, 2, 256), "float32", (2, 64), "float32", (2, 256, 4)),
    "gemma2-9b, int8": ((512, 8, 2, 256), "bfloat16", (2, 64), "int8", (4, 256, 8)),
    "gemma2-9b, a short chunk": ((40, 8, 2, 256), "float32", (2, 64), "float32", (4, 48, 4)),
    "large pages": ((512, 1, 8, 256), "float32", (2, 1024), "float32", (1, 64, 1)),
    "many features, fewer tokens": ((512, 2, 8, 1280), "float32", (2, 64), "float32", (1, 16, 4)),
    "deepseek-v3": ((512, 1, 128, 576), "bfloat16", (1, 64), "bfloat16", (1, 16, 8)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_block_is_as_large_as_pays_and_fits(name: str) -> None:
    (tokens, k, g, c), of, (planes, size), stored, expected = TAKEN[name]
    pages = jax.eval_shape(lambda: empty_pages((100, planes, k, size, c), stored))
    blocks = tpu_blocks.choose_blocks(jnp.zeros((1, tokens, k, g, c), of), pages)
    assert (blocks.heads, blocks.tokens, blocks.pages) == expected


def trace(
    page_size: int = 16, width: int = 1, of: str = "float32", stored: str = "float32", scale: float = 1.0, c: int = 8
) -> None:
    queries, pages = jnp.zeros((1, 5, 1, 1, c), of), jnp.zeros((3, 2, 1, page_size, c), stored)
    table, positions, lengths = (jnp.zeros(shape, jnp.int32) for shape in ((1, width), (1, 5), (1,)))
    form = partial(tpu.paged_prefill_attention, window=None, scale=scale, softcap=None)
    jax.eval_shape(form, queries, pages, table, positions, lengths)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"page_size": 24}, "pages of 24 tokens"),
        ({"page_size": 1024, "c": 300}, "pages of 1024 tokens: of 300 features at most 682 fit into VMEM"),
        ({"c": 5_000}, "16 queries of 5000 features and pages of 16 tokens do not fit"),
        ({"width": 300_000}, "page table of 300000 pages a row: at most 131072 fit in SMEM"),
        ({"scale": 0.0}, "scale of 0"),
        ({"of": "float16", "stored": "bfloat16"}, "queries of float16"),
        ({"stored": "float16"}, "pages of float16"),
    ],
)
def test_what_the_kernel_cannot_do_it_refuses(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        trace(**changed)
