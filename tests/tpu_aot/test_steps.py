"""The engine's steps compiled for a TPU: each layer calls its kernels once, in place; nothing else touches the pool."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod

import pytest
from aot.steps import Serving, StepJob, compile_step, config_of, devices_for
from aot.table import run

LAYERS = 2
# A layer's pages are more than VMEM holds, where XLA would fetch a small pool as a whole.
SERVING = Serving(rows=16, context=32_768, chunk=256)
# The last layer's attention in prefill has one query a row, that of the last token: the others are read by nobody.
CALLS = {
    "decode": {"kv_write": LAYERS, "paged_decode_attention": LAYERS},
    "prefill": {"kv_write": LAYERS, "paged_prefill_attention": LAYERS - 1, "paged_decode_attention": 1},
}
CASES = [
    ("llama3.1-8b", "decode", "v6e", 1, None),
    ("llama3.1-8b", "decode", "v5e", 4, "int8"),
    ("smollm2-135m", "decode", "v5p", 1, None),  # heads of 64
    ("smollm2-135m", "prefill", "v6e", 1, None),
]
every_case = pytest.mark.parametrize(("model", "kind", "chip", "tensor", "cache"), CASES)


@cache
def step(model, kind, chip, tensor, cache):
    # A large vocabulary is most of the compiler's work, and none of what is looked at here.
    config = replace(config_of(model), layers=LAYERS, vocab_size=2_048)
    return compile_step(config, kind, chip, replace(SERVING, cache_dtype=cache), tensor)


@every_case
def test_each_layer_calls_its_kernels_once(model, kind, chip, tensor, cache):
    expected = dict(CALLS[kind])
    expected["kv_write"] *= 2 if cache else 1  # scales are written by a call of their own
    assert step(model, kind, chip, tensor, cache).kernels == expected


@every_case
def test_only_kernels_touch_the_pool(model, kind, chip, tensor, cache):
    """No gather, scatter, slice or copy: what has the pool's shape is an argument or a kernel's result.

    Scales of int8 pages are left out: they are small, and where they fit XLA moves them to VMEM and back.
    """
    found = step(model, kind, chip, tensor, cache)
    _, _, computations = found.program.text.partition("\n")  # the first line is the signature
    called, _, entry = computations.partition("\nENTRY ")
    (shape,) = {shape for shape in found.pool if len(shape) == 5}
    pool = rf"\w+\[{','.join(map(str, shape))}\]"
    assert not re.findall(pool, called)  # no fusion, loop or branch takes it
    made = Counter(re.findall(rf"= \(?{pool}\S* ([\w-]+)\(", entry))
    assert made == {"parameter": LAYERS, "custom-call": LAYERS}


@every_case
def test_the_state_is_written_in_place(model, kind, chip, tensor, cache):
    found = step(model, kind, chip, tensor, cache)
    layer = max(map(prod, found.pool)) * (1 if cache else 2)
    assert found.program.alias_bytes >= LAYERS * layer
    assert found.program.temporary_bytes < layer / 8


def test_a_model_that_one_chip_does_not_hold_is_spread_and_one_that_does_not_fit_is_a_fault():
    serving = Serving()
    assert [devices_for(config_of("llama3.1-8b"), serving, chip) for chip in ("v5e", "v6e")] == [4, 1]
    assert devices_for(config_of("smollm2-135m"), serving, "v5e") == 1
    outcome = run(StepJob("no-such-model", "decode", serving), "v5e")
    assert outcome.fault == "ValueError: no model 'no-such-model'; expected one of smollm2-135m, llama3.1-8b"
