"""The engine's steps compiled for an H200 with the Pallas forms: a call a layer, and nothing else touches the pool."""

import re
from functools import cache
from math import prod

import pytest
from aot.cuda_table import LAYERS, compile_step
from aot.steps import Serving, StepJob, config_of

from jaxinfer.engine.cache import pages_per_sequence

SERVING = Serving(rows=16, context=4_096, page_size=64, chunk=256)
# The last layer's attention in prefill has one query a row, that of the last token: the others are read by nobody.
CALLS = {
    "decode": ["kv_write", "paged_decode_attention"] * LAYERS,
    "prefill": ["kv_write", "paged_prefill_attention"] * (LAYERS - 1) + ["kv_write", "paged_decode_attention"],
}
CASES = [("llama3.1-8b", "decode"), ("smollm2-135m", "decode"), ("smollm2-135m", "prefill")]
every_case = pytest.mark.parametrize(("model", "kind"), CASES)


@cache
def compiled(model, kind):
    return compile_step(StepJob(model, kind, SERVING))


def pool_shape(model):
    config = config_of(model)
    pages = SERVING.rows * pages_per_sequence(SERVING.page_size, SERVING.context)
    return (pages, 2, config.kv_heads, SERVING.page_size, config.head_dim)


@every_case
def test_each_layer_calls_its_kernels_once(model, kind):
    assert sorted(compiled(model, kind).calls) == sorted(CALLS[kind])


@every_case
def test_only_kernels_touch_the_pool(model, kind):
    """No gather, scatter, slice or copy: what has the pool's shape is an argument, a kernel's result, or a view.

    JAX 0.12 calls a kernel and the slice of the packed rows that it is handed a fusion, `dynamic-slice-fusion`.
    """
    pool = rf"= \(?bf16\[{','.join(map(str, pool_shape(model)))}\]\S* ([\w-]+)\((?!.*calls=%dynamic-slice-fusion)"
    made = re.findall(pool, compiled(model, kind).text)
    assert set(made) <= {"parameter", "custom-call", "bitcast", "get-tuple-element"}
    assert made.count("parameter") >= LAYERS


@every_case
def test_the_state_is_written_in_place(model, kind):
    layer = 2 * prod(pool_shape(model))  # bytes
    assert compiled(model, kind).alias_bytes >= LAYERS * layer
    assert compiled(model, kind).temporary_bytes < layer / 2
