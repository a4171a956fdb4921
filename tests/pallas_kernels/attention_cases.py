"""Cases of paged attention that every form of it is held against: NaN stands in every slot that nobody reads."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import as_float32, quantise
from pallas_kernels.shapes import AttentionShape as Shape


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


def in_int8(case: Case) -> tuple[Case, Case]:
    """The case with pages of int8, and with the numbers that those stand for."""
    pages = jax.jit(quantise)(case.pages)
    return case._replace(pages=pages), case._replace(pages=jax.jit(as_float32)(pages))


ROUNDED = (2**-7, 2**-8)
"""Relative and absolute tolerance where weights and the result are rounded to bfloat16: each is off by 2 ** -9 of its
size at most, once or twice, and values are of size 1."""


def in_dtype(case: Case, dtype: str) -> tuple[Case, Case]:
    """The case with pages and queries of float32 or bfloat16, or with int8 pages and queries of bfloat16; and the same
    with pages of the numbers that those stand for.
    """
    case = case._replace(queries=jnp.asarray(case.queries, "float32" if dtype == "float32" else "bfloat16"))
    if dtype == "int8":
        return in_int8(case)
    case = case._replace(pages=jnp.asarray(case.pages, dtype))
    return case, case


def how(shape: Shape) -> dict[str, Any]:
    """The static arguments of a call."""
    return {"window": shape.window, "scale": shape.head_dim**-0.5, "softcap": shape.softcap}


def run_prefill(form: Any, case: Case, shape: Shape) -> np.ndarray:
    """What a form of prefill attention gives, [s, t, k, g, c]."""
    return _run(form, case[:-1], case.sinks, shape)


def run_decode(form: Any, case: Case, shape: Shape) -> np.ndarray:
    """What a form of decode attention gives, [s, k, g, c], for a case of one query a row."""
    return _run(form, (case.queries[:, 0], case.pages, case.page_table, case.lengths), case.sinks, shape)


def _run(form: Any, arrays: tuple[Any, ...], sinks: Any, shape: Shape) -> np.ndarray:
    arrays, sinks = jax.tree.map(jnp.asarray, (arrays, sinks))
    return np.asarray(jax.jit(lambda *arrays, sinks: form(*arrays, **how(shape), sinks=sinks))(*arrays, sinks=sinks))


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
