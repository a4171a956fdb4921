"""What a product asks of the compiler of an accelerator; what is known of what ran."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.engine.ops import PagedOps
from jaxinfer.model.ops import TokenBatch
from jaxinfer.model.quantised import Quantised
from pallas_kernels.dispatch import FORMS, OPERATIONS, Entry

TPU = PagedOps(dict.fromkeys(OPERATIONS, "reference"), platform="tpu")
INT8 = jnp.ones((6, 2, 4), jnp.int8)
WEIGHTS = {
    "plain": jnp.ones((6, 2, 4)),
    "int8 by channel": Quantised(INT8, jnp.ones((6, 1, 1))),
    "int8 in groups": Quantised(INT8, jnp.ones((6, 2, 2)), jnp.ones((6, 2, 2))),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_float32_product_is_float32(kind: str):
    """Left alone, a TPU would round both sides to bfloat16 first, and a GPU to TF32."""
    traced: Any = jax.make_jaxpr(lambda x, weight: TPU.matmul(x, weight, axes=2))(jnp.ones((3, 2, 4)), WEIGHTS[kind])
    products = str(traced).split("dot_general[")[1:]
    assert products
    assert all("precision=(Precision.HIGHEST, Precision.HIGHEST)" in product for product in products)


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
