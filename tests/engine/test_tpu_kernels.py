"""One program: a model gives the same logits with the TPU's kernels, interpreted, as with plain XLA."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.config import MeshConfig
from jaxinfer.engine.lanes import page_lanes
from jaxinfer.engine.ops import PagedOps
from jaxinfer.engine.sharding import make_mesh
from jaxinfer.model.ops import TokenBatch
from jaxinfer.model.transformer import Transformer, init_params
from pallas_kernels.dispatch import FORMS, Entry
from pallas_kernels.pages import empty_pages

from .driver import MODEL

PAGE = 32
CONFIG = replace(MODEL, head_dim=64, query_scale=0.125, windows=(None, 24))
KERNELS = ("paged_decode_attention", "paged_prefill_attention", "kv_write")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Names under which the TPU's kernels run here."""
    params = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise")
    for operation in KERNELS:
        form = partial(Entry("tpu").load(operation), interpret=params)
        monkeypatch.setitem(FORMS, operation, (Entry("interpreted", form, ()), *FORMS[operation]))
    yield dict.fromkeys(KERNELS, "interpreted")
    pltpu.reset_tpu_interpret_mode_state()


def logits(ops: PagedOps, dtype: str) -> list[Any]:
    """Of a prompt of 40 tokens in two chunks, then of three decoded ones, in a row beside an empty one."""
    model = Transformer(CONFIG, jnp.float32)
    params: Any = init_params(CONFIG, jnp.float32, jax.random.key(4))
    lanes = page_lanes(CONFIG, dtype, "tpu")
    shape = (5, lanes.planes, CONFIG.kv_heads, PAGE, lanes.features)
    pages: Any = tuple(empty_pages(shape, jnp.dtype(dtype)) for _ in range(CONFIG.layers))
    table = jnp.array([[3, 1], [0, 4]], jnp.int32)

    @jax.jit
    def step(pages: Any, tokens: Any, start: Any) -> tuple[Any, Any]:
        count = tokens.shape[1]
        positions = jnp.stack([start + jnp.arange(count), jnp.full(count, -1)])
        batch = TokenBatch(jnp.stack([tokens[0], tokens[0]]), positions, table, jnp.stack([start + count, 0]))
        hidden, pages = model.apply({"params": params}, batch, pages, ops)
        return model.apply({"params": params}, hidden[0], ops, method="logits"), pages

    ids, found = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (1, 43)), []
    for begin, end in ((0, 20), (20, 40), (40, 41), (41, 42), (42, 43)):
        made, pages = step(pages, ids[:, begin:end], jnp.int32(begin))
        found.append(np.asarray(made))
    return found


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_model_gives_the_logits_of_plain_xla(interpreted: dict[str, str], dtype: str, tensor: int):
    lanes, mesh = page_lanes(CONFIG, dtype, "tpu"), make_mesh(MeshConfig(tensor=tensor))
    kernels = PagedOps(interpreted, lanes=lanes, mesh=mesh)
    for got, expected in zip(logits(kernels, dtype), logits(PagedOps(lanes=lanes), dtype), strict=True):
        # Beside int8 keys and values, queries and weights are rounded to bfloat16.
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 if dtype == "float32" else 2e-2)
