"""Every kernel with the real shapes it shares with tests and benchmarks, as arguments without values."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from aot.compiling import formats
from pallas_kernels.arrays import Int8Pages
from pallas_kernels.dispatch import OPERATIONS
from pallas_kernels.pages import empty_pages
from pallas_kernels.tpu_chip import vmem_bytes

DTYPES = ("bfloat16", "float32", "int8")
"""Of pages. Queries of int8 pages are bfloat16."""
POOL_NUMBERS = 2**28
"""256 MiB of int8; the largest VMEM has 128."""


@dataclass(frozen=True)
class Case:
    """One kernel at one shape. args are shapes.

    unit_bytes: of what its memory traffic is counted in (a page, a weight); 0 for what a turn of its main loop fetches.
    """

    operation: str
    shape: str
    dtype: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    static: dict[str, Any] = field(default_factory=dict)
    donated: tuple[int, ...] = ()
    unit_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.operation} [{self.shape}] {self.dtype}"

    def jitted(self, devices: Mesh | None = None) -> Any:
        """The kernel as the engine's steps call it; for `devices`, with what it is given in place laid out as it is."""
        placed: dict[str, Any] = {}
        if devices is not None and self.donated:
            placed["out_shardings"] = formats(devices, self.args[self.donated[0]])
        return jax.jit(lambda *args: self.function(*args, **self.static), donate_argnums=self.donated, **placed)

    def refusal(self, devices: Mesh | None = None) -> str | None:
        """Why the kernel does not do this case, which then falls to the next form; None where it does it.

        devices: what it would be compiled for; there are kernels that ask.
        """
        try:
            with nullcontext() if devices is None else jax.set_mesh(devices):
                jax.eval_shape(self.jitted(), *self.args)
        except NotImplementedError as reason:
            return str(reason)
        return None

    def fetched_bytes(self) -> int:
        """Bytes that the kernel's first scratch holds at once: it has two rooms, one of which fills as one is read.

        As VMEM holds them; 0 where the kernel has no scratch.
        """
        (call,) = _pallas_calls(jax.make_jaxpr(self.jitted())(*self.args).jaxpr)
        scratch = call.params["grid_mapping"].scratch_avals
        if not scratch or getattr(scratch[0], "ndim", 0) < 2:
            return 0
        return vmem_bytes(scratch[0].shape, scratch[0].dtype.itemsize) // 2


def _pallas_calls(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        else:
            for value in equation.params.values():
                if hasattr(value, "jaxpr"):
                    yield from _pallas_calls(value.jaxpr)


def cases(operation: str, dtypes: tuple[str, ...] = DTYPES, shapes: str = "", form: str = "tpu") -> Iterator[Case]:
    """Cases of a form of an operation whose shape has `shapes` in its name (of quant_matmul with the number of rows).

    Raises ValueError for an operation or a dtype that does not exist.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"no operation {operation!r}; expected one of {', '.join(OPERATIONS)}")
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise ValueError(f"no dtype {unknown[0]!r} of a kernel's pages; expected one of {', '.join(DTYPES)}")
    kernel = getattr(importlib.import_module(f"pallas_kernels.{operation}.{form}"), operation)
    named = importlib.import_module(f"pallas_kernels.{operation}.shapes").SHAPES
    make = {"kv_write": _write, "quant_matmul": _matmul}.get(operation, _attention)
    for name, shape in named.items():
        yield from (case for case in make(operation, name, shape, kernel, dtypes) if shapes in case.shape)


def _attention(operation: str, name: str, shape: Any, form: Any, dtypes: tuple[str, ...]) -> Iterator[Case]:
    s, t, k, g, c = shape.rows, shape.tokens, shape.kv_heads, shape.group, shape.head_dim
    static = {"window": shape.window, "scale": c**-0.5, "softcap": shape.softcap}
    lengths, table = _int32(s), _int32(s, shape.table_width)
    for dtype in dtypes:
        pages = _pages(shape, dtype)
        of = "bfloat16" if dtype == "int8" else dtype
        sinks = (_array((k, g), "float32"),) if shape.sinks else ()
        if operation == "paged_decode_attention":
            args: tuple[Any, ...] = (_array((s, k, g, c), of), pages, table, lengths, *sinks)
        else:
            args = (_array((s, t, k, g, c), of), pages, table, _int32(s, t), lengths, *sinks)
        function = _with_sinks(form) if sinks else form
        yield Case(operation, name, dtype, function, args, static, unit_bytes=page_bytes(pages))


def _write(operation: str, name: str, shape: Any, form: Any, dtypes: tuple[str, ...]) -> Iterator[Case]:
    s, t = shape.rows, shape.tokens
    for dtype in dtypes:
        pages = _pages(shape, dtype)
        new = _array((s, t, shape.kv_heads, shape.head_dim), "bfloat16" if dtype == "int8" else dtype)
        values = new if shape.planes == 2 else None
        args = (pages, new, values, _int32(s, shape.table_width), _int32(s, t))
        yield Case(operation, name, dtype, form, args, donated=(0,))


def _matmul(operation: str, name: str, shape: Any, form: Any, dtypes: tuple[str, ...]) -> Iterator[Case]:
    rows = importlib.import_module(f"pallas_kernels.{operation}.shapes").ROWS
    for dtype in (dtype for dtype in dtypes if dtype != "int8"):
        for n in rows:
            scale = _array((shape.outputs, shape.groups), dtype)
            values = _array((shape.outputs, shape.inputs), shape.values)
            args = (_array((n, shape.inputs), dtype), values, scale, scale if shape.offset else None)
            static = {"dtype": jnp.dtype(dtype)}
            yield Case(operation, f"{name}, {n} rows", dtype, form, args, static, unit_bytes=shape.bytes)


def page_bytes(pages: Any) -> int:
    """Bytes of one page, all planes and heads, scales included."""
    return sum(leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))


def _pages(shape: Any, dtype: str) -> Any:
    """The pool of a case: pages for all its rows, and more than the chip holds, where XLA would put a small one."""
    page = shape.planes * shape.kv_heads * shape.page_size * shape.head_dim
    count = max(shape.rows * shape.table_width + 1, POOL_NUMBERS // page)
    whole = (count, shape.planes, shape.kv_heads, shape.page_size, shape.head_dim)
    pages = jax.eval_shape(lambda: empty_pages(whole, jnp.dtype(dtype)))
    return Int8Pages(*pages) if isinstance(pages, Int8Pages) else pages


def _with_sinks(form: Any) -> Any:
    return lambda *args, **static: form(*args[:-1], sinks=args[-1], **static)


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
