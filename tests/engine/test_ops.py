"""What a product asks of the compiler of an accelerator; what is known of what ran."""

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.engine.ops import PagedOps
from jaxinfer.model.ops import TokenBatch
from jaxinfer.model.plain_ops import PlainWeights
from jaxinfer.model.quantised import Quantised
from pallas_kernels.dispatch import FORMS, Entry

INT8 = jnp.ones((6, 2, 4), jnp.int8)
KINDS = ["plain", "int8 by channel", "int8 in groups"]
PLAIN = [(op, entry.name) for op, forms in FORMS.items() for entry in forms if entry.name not in ("tpu", "gpu")]
PRODUCT = re.compile(r"(?:dot_general|ragged_dot).*\((tensor<\S+>), (tensor<\S+>)[,)].* -> ")


def products(call: Callable[..., Any], *args: Any) -> list[tuple[bool, bool]]:
    """Of each product in the lowered text: whether a side is float32, and whether it asks for the highest precision."""
    text = jax.jit(call).lower(*args).as_text().replace("#stablehlo<precision HIGHEST>", "HIGHEST")
    lines = [line for line in text.splitlines() if "dot_general" in line or "ragged_dot" in line]
    sides = [PRODUCT.search(line) for line in lines]
    assert lines
    assert all(sides), lines
    return [
        ("f32>" in side[1] or "f32>" in side[2], "[HIGHEST, HIGHEST]" in line)
        for side, line in zip(sides, lines, strict=True)
        if side
    ]


def weight_of(kind: str, axes: int) -> Any:
    """A weight [6, 2, 4], of which the last `axes` are contracted."""
    if kind == "plain":
        return jnp.ones(INT8.shape)
    if kind == "int8 by channel":
        return Quantised(INT8, jnp.ones((6, 1, 1) if axes == 2 else (6, 2, 1)))
    return Quantised(INT8, jnp.ones((6, 2, 2)), jnp.ones((6, 2, 2)))


def call_of(operation: str, form: str, dtype: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An operation of a model of `dtype`, and its arguments."""
    run = Entry(form).load(operation)
    table, one = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    pages, queries = jnp.ones((1, 2, 1, 16, 8), dtype), jnp.ones((1, 4, 1, 2, 8), dtype)
    how: dict[str, Any] = {"window": None, "scale": 0.3, "softcap": None}
    if operation == "paged_decode_attention":
        return partial(run, **how), (queries[:, 0], pages, table, one)
    if operation == "paged_prefill_attention":
        return partial(run, **how), (queries, pages, table, jnp.arange(4)[None], 4 * one)
    groups = jnp.ones((6, 2))
    return partial(run, dtype=dtype), (jnp.ones((3, 8), dtype), INT8.reshape(6, 8), groups, groups)


@pytest.mark.parametrize(("operation", "form"), [it for it in PLAIN if it[0] != "kv_write"])
def test_a_plain_form_multiplies_float32_as_float32(operation: str, form: str):
    """Left alone, a TPU would round both sides to bfloat16 first, and a GPU to TF32."""
    call, args = call_of(operation, form, jnp.float32)
    assert set(products(call, *args)) == {(True, True)}


@pytest.mark.parametrize("operation", ["paged_decode_attention", "paged_prefill_attention", "quant_matmul"])
def test_a_bfloat16_model_pays_for_no_precision_in_plain_xla(operation: str):
    """Six passes of a TPU for one are what the highest precision of float32 costs; two sides of bfloat16 need one."""
    call, args = call_of(operation, "xla", jnp.bfloat16)
    assert (True, True) not in products(call, *args)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_product_with_a_weight_is_float32(kind: str, axes: int, platform: str):
    ops = PagedOps({"quant_matmul": "xla"}, platform=platform)
    x, weight = jnp.ones((3, 2, 4)), weight_of(kind, axes)
    found = products(lambda x, weight: ops.matmul(x, weight, axes=axes), x, weight)
    assert set(found) == {(True, True)}


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_product_of_experts_is_float32(kind: str, platform: str):
    ops = PagedOps({"quant_matmul": "xla"}, platform=platform)
    found = products(ops.grouped_matmul, jnp.ones((3, 4)), weight_of(kind, 1), jnp.array([1, 2, 0, 0, 0, 0]))
    assert set(found) == {(True, True)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_product_without_an_engine_is_float32(kind: str):
    plain = PlainWeights()
    assert set(products(partial(plain.matmul, axes=2), jnp.ones((3, 2, 4)), weight_of(kind, 2))) == {(True, True)}
    found = products(plain.grouped_matmul, jnp.ones((3, 4)), weight_of(kind, 1), jnp.array([1, 2, 0, 0, 0, 0]))
    assert set(found) == {(True, True)}


def picky(pages: Any, keys: Any, *rest: Any) -> Any:
    if keys.shape[1] > 1:
        raise NotImplementedError(f"{keys.shape[1]} tokens are too many")
    return pages


def write(ops: PagedOps, tokens: int) -> None:
    """Traces a write of so many tokens a row."""
    keys, numbers = jnp.ones((1, tokens, 1, 8)), jnp.zeros((1, tokens), jnp.int32)
    batch = TokenBatch(numbers, numbers, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    jax.eval_shape(lambda pages: ops.write(pages, keys, keys, batch), jnp.ones((1, 2, 1, 16, 8)))


def ran(ops: PagedOps) -> list[tuple[str, str]]:
    return [(kernel.form, kernel.why) for kernel in ops.kernels if kernel.operation == "kv_write"]


def test_all_that_ran_is_known_with_every_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="jaxinfer.engine.ops")
    monkeypatch.setitem(FORMS, "kv_write", (Entry("picky", picky), *FORMS["kv_write"]))
    ops = PagedOps(traced_with="a model")
    first = [("picky", "the first of ['picky', 'xla', 'reference'] offered on cpu")]
    assert ran(ops) == first
    for tokens in (2, 1, 3, 2, 1):
        write(ops, tokens)
    refused = [("xla", f"picky cannot: {tokens} tokens are too many") for tokens in (2, 3)]
    assert ran(ops) == [refused[0], *first, refused[1]]
    assert len(caplog.messages) == 3
    (line,) = (line for line in ops.why.splitlines() if line.startswith("kv_write: "))
    assert line.count("; ") == 2
    assert ran(PagedOps(traced_with="a model")) == ran(ops), "jit traces for the first of equals alone"
    assert ran(PagedOps(traced_with="another")) == first
    assert ran(PagedOps({"paged_decode_attention": "xla"}, traced_with="a model")) == first
