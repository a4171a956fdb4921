"""Attention cases for the GPU's kernels: bfloat16, and small, as every step of an interpreted kernel is a callback."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import as_float32, quantise
from pallas_kernels.shapes import AttentionShape as Shape

from .attention_cases import Case, make_case

KEYS = 150
"""Most keys of a row: two whole blocks and part of one."""
WINDOW = 90
"""Widest window: it begins inside a block."""


def make_rounded_case(shape: Shape, lengths: list[int], int8: bool = False) -> Case:
    """A case in bfloat16, or with int8 pages, and with nonsense for pages that lie before the windows too."""
    case = make_case(shape, lengths)
    if shape.window is not None:
        for row, length in enumerate(lengths):
            first = max(0, length - min(shape.tokens, length) - shape.window + 1)
            case.page_table[row, : first // shape.page_size] = len(case.pages)
    pages = quantise(case.pages) if int8 else jnp.asarray(case.pages, jnp.bfloat16)
    return case._replace(queries=jnp.asarray(case.queries, jnp.bfloat16), pages=pages)


def small(shapes: dict[str, Shape], refused: Any, tokens: int) -> dict[str, Shape]:
    """The shapes that the kernel does not refuse, of one key head and at most `tokens` queries, by one name each."""
    cut = {
        replace(
            shape,
            rows=1,
            tokens=min(shape.tokens, tokens),
            length=min(shape.length, KEYS),
            kv_heads=1,
            window=shape.window and min(shape.window, WINDOW),
        ): name
        for name, shape in shapes.items()
        if name not in refused
    }
    return {name: shape for shape, name in cut.items()}


def check_close(run: Callable[..., np.ndarray], form: Any, reference: Any, case: Case, shape: Shape) -> None:
    """What `form` gives for a rounded case is what the reference gives in float32, but for three roundings.

    They are those of the weights, of a split's mean and of the result, 2^-9 each of the sum of weighted magnitudes,
    which the reference gives for the values' magnitudes.
    """
    exact = case._replace(queries=np.asarray(case.queries, np.float32), pages=np.array(as_float32(case.pages)))
    expected = run(reference, exact, shape)
    exact.pages[:, 1] = np.abs(exact.pages[:, 1])
    got = run(form, case, shape)
    assert got.dtype == jnp.bfloat16
    got = got.astype(np.float32)
    assert np.isfinite(got).all(), "a query met a NaN"
    assert (np.abs(got - expected) <= 3 * 2**-9 * run(reference, exact, shape) + 1e-6).all()
