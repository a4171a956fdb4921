"""Every form of an operation that is offered on a GPU against the reference, over the shapes that the operation names.

NaN lies in every page that no row owns and in every slot past a row's length, so that a wrong read is a wrong result.
Nothing is timed here: the operations are checked side by side and share the device.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from gpu.interpreting import INTERPRET
from gpu.jobs import Job, Outcome
from pallas_kernels.dispatch import FORMS, Operation, choose
from pallas_kernels.pages import quantise

FORM_NAMES = ("xla", "gpu")
WITHIN = {"kv_write": 0.0, "quant_matmul": 2**-7}
"""Largest error allowed, as a share of the largest number of the result; `ROUNDED` where nothing is said."""
ROUNDED = 2**-6
"""Attention rounds weights and result to bfloat16, whose numbers lie up to 2^-8 apart."""
ROWS = (8, 512)
"""Rows that meet a quantised weight; in a small run the first alone."""


@dataclass(frozen=True)
class Call:
    """Arguments of an operation, by position and by name; `donated`: the first is consumed."""

    args: tuple[Any, ...]
    how: dict[str, Any]
    donated: bool = False


def kernel_jobs(name: str, small: bool) -> list[Job]:
    """A job for each form and shape of an operation; shapes are shrunk, and Pallas interpreted, where `small`."""
    operation = cast(Operation, name)
    offered = {entry.name for entry in FORMS[operation]}
    return [
        Job(f"{form} | {name}", partial(check, operation, form, make, small))
        for name, make in calls(operation, small)
        for form in FORM_NAMES
        if form in offered
    ]


def calls(operation: Operation, small: bool) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Named calls, whose numbers are made when asked for."""
    shapes = importlib.import_module(f"pallas_kernels.{operation}.shapes").SHAPES
    if operation == "quant_matmul":
        yield from _products(shapes, small)
    elif operation == "kv_write":
        yield from _writes(shapes, small)
    else:
        yield from _attentions(shapes, small)


def check(operation: Operation, form: str, make: Callable[[], Call], small: bool) -> Outcome:
    """Whether the form equals the reference, and how far it is off."""
    call, expected = _expected(operation, make)
    interpret = {"interpret": INTERPRET} if small and form == "gpu" else {}
    run = jax.jit(partial(choose(operation, form), **call.how, **interpret), donate_argnums=0 if call.donated else ())
    first = jax.tree.map(jnp.copy, call.args[0]) if call.donated else call.args[0]
    error, allowed = worst_error(run(first, *call.args[1:]), expected), WITHIN.get(operation, ROUNDED)
    right = error <= allowed
    why = "" if right else f"off by {error:.2g}, {allowed:.2g} allowed"
    return Outcome("ok" if right else "wrong", why, {"error": error})


@lru_cache(maxsize=1)
def _expected(operation: Operation, make: Callable[[], Call]) -> tuple[Call, Any]:
    """A call and what the reference makes of it; kept for the other forms, whose jobs come next."""
    call = make()
    reference = jax.jit(partial(choose(operation, "reference"), **call.how))
    return call, jax.block_until_ready(reference(*call.args))


def worst_error(got: Any, expected: Any) -> float:
    """The largest difference, as a share of the largest number expected; infinite where one alone is not finite."""

    def worst(got: Any, expected: Any) -> float:
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        if not np.array_equal(np.isfinite(got), np.isfinite(expected)):
            return float("inf")
        finite = np.isfinite(expected)
        off = np.abs(got - expected)[finite].max(initial=0.0)
        return float(off / max(np.abs(expected[finite]).max(initial=0.0), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(worst, got, expected)))


def _attentions(shapes: dict[str, Any], small: bool) -> Iterator[tuple[str, Callable[[], Call]]]:
    if small:
        (shape, *_) = shapes.values()
        yield "small", partial(_attention, replace(shape, tokens=min(shape.tokens, 64), length=96, kv_heads=1), False)
        return
    for name, shape in shapes.items():
        yield name, partial(_attention, shape, False)
    (name, shape, *_) = next(iter(shapes.items()))
    yield f"{name}, int8 pages", partial(_attention, shape, True)


def _attention(shape: Any, int8: bool) -> Call:
    random = np.random.default_rng(0)
    rows, width, b = shape.rows, shape.table_width, shape.page_size
    lengths = np.array([max(shape.tokens, shape.length - 5 * row) for row in range(rows)], np.int32)
    pool = np.full((rows * width + 2, shape.planes, shape.kv_heads, b, shape.head_dim), np.nan, np.float32)
    table = random.permutation(len(pool))[: rows * width].reshape(rows, width).astype(np.int32)
    for row, length in enumerate(lengths):
        for place in range(-(-length // b)):
            filled = min(b, length - place * b)
            pool[table[row, place], :, :, :filled] = random.standard_normal((*pool.shape[1:3], filled, pool.shape[4]))
        table[row, -(-length // b) :] = 2**30
    pages = quantise(jnp.asarray(pool)) if int8 else jnp.asarray(pool, jnp.bfloat16)
    queries = jnp.asarray(random.standard_normal((rows, shape.tokens, shape.kv_heads, shape.group, shape.head_dim)))
    sinks = jnp.asarray(random.standard_normal((shape.kv_heads, shape.group)), jnp.float32) if shape.sinks else None
    how = {"window": shape.window, "scale": shape.head_dim**-0.5, "softcap": shape.softcap, "sinks": sinks}
    queries = queries.astype(jnp.bfloat16)
    if shape.tokens == 1:
        return Call((queries[:, 0], pages, jnp.asarray(table), jnp.asarray(lengths)), how)
    positions = lengths[:, None] - shape.tokens + np.arange(shape.tokens, dtype=np.int32)
    return Call((queries, pages, jnp.asarray(table), jnp.asarray(positions), jnp.asarray(lengths)), how)


def _writes(shapes: dict[str, Any], small: bool) -> Iterator[tuple[str, Callable[[], Call]]]:
    if small:
        (shape, *_) = shapes.values()
        shapes = {"small": replace(shape, kv_heads=1)}
    for name, shape in shapes.items():
        for dtype in ("bfloat16",) if small else ("float32", "bfloat16", "int8"):
            yield f"{name}, {dtype}", partial(_write, shape, dtype)


def _write(shape: Any, dtype: str) -> Call:
    random = np.random.default_rng(0)
    rows, width = shape.rows, shape.table_width
    pool = random.standard_normal((rows * width + 1, shape.planes, shape.kv_heads, shape.page_size, shape.head_dim))
    pages = quantise(jnp.asarray(pool, jnp.float32)) if dtype == "int8" else jnp.asarray(pool, dtype)
    keys, values = random.standard_normal((2, rows, shape.tokens, shape.kv_heads, shape.head_dim))
    table = random.permutation(rows * width).reshape(rows, width).astype(np.int32)
    positions = shape.start + np.tile(np.arange(shape.tokens, dtype=np.int32), (rows, 1))
    positions[-1, max(1, shape.tokens - 3) :] = -1
    new = [jnp.asarray(plane, jnp.bfloat16) for plane in (keys, values)]
    second = new[1] if shape.planes == 2 else None
    return Call((pages, new[0], second, jnp.asarray(table), jnp.asarray(positions)), {}, donated=True)


def _products(shapes: dict[str, Any], small: bool) -> Iterator[tuple[str, Callable[[], Call]]]:
    if small:
        shape = next(shape for shape in shapes.values() if shape.group == 0)
        shapes = {"small": replace(shape, outputs=64, inputs=128)}
    for rows in ROWS[:1] if small else ROWS:
        for name, shape in shapes.items():
            yield f"{name}, {rows} rows", partial(_product, shape, rows)


def _product(shape: Any, rows: int) -> Call:
    keys = jax.random.split(jax.random.key(0), 4)
    most = 7 if shape.values == "int4" else 127
    x = jax.random.normal(keys[0], (rows, shape.inputs), jnp.bfloat16)
    values = jax.random.randint(keys[1], (shape.outputs, shape.inputs), -most, most + 1, jnp.int8).astype(shape.values)
    scale = jax.random.uniform(keys[2], (shape.outputs, shape.groups), jnp.float32, 0.5, 1.0) / most
    offset = jax.random.normal(keys[3], scale.shape, jnp.float32) if shape.offset else None
    return Call((x, values, scale, offset), {"dtype": jnp.float32})
