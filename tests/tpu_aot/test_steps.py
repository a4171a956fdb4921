"""The engine's steps compiled for a TPU: each layer calls its kernels once, in place; nothing else touches the pool."""

import re
from dataclasses import replace
from functools import cache

import pytest
from aot.chips import GENERATIONS
from aot.steps import Serving, compile_step, config_of, devices_for
from aot.table import StepJob, run

LAYERS = 2
MODEL = "llama3.1-8b"
SERVING = Serving(rows=8, context=1_024, chunk=256)
# A layer's last attention in prefill has one query a row, that of the last token: the others are read by nobody.
CALLS = {
    "decode": {"kv_write": LAYERS, "paged_decode_attention": LAYERS},
    "prefill": {"kv_write": LAYERS, "paged_prefill_attention": LAYERS - 1, "paged_decode_attention": 1},
}
CASES = [("decode", "v6e", 1), ("prefill", "v6e", 1), ("decode", "v5e", 4), ("prefill", "tpu7x", 4)]


@cache
def step(kind, chip, tensor):
    # A large vocabulary is most of the compiler's work, and none of what is looked at here.
    config = replace(config_of(MODEL), layers=LAYERS, vocab_size=2_048)
    return compile_step(config, kind, chip, SERVING, tensor)


@pytest.mark.parametrize(("kind", "chip", "tensor"), CASES)
def test_each_layer_calls_its_kernels_once(kind, chip, tensor):
    assert step(kind, chip, tensor).kernels == CALLS[kind]


@pytest.mark.parametrize(("kind", "chip", "tensor"), CASES)
def test_only_kernels_touch_the_pool(kind, chip, tensor):
    """No gather, scatter, slice or copy: what has the pool's shape is an argument or a kernel's result."""
    found = step(kind, chip, tensor)
    heads, head = found.config.kv_heads // tensor, found.config.head_dim
    pool = rf"bf16\[{SERVING.pages},2,{heads},{SERVING.page_size},{head}\]"
    fused, _, entry = found.program.text.partition("\nENTRY ")
    assert not re.findall(pool, fused)  # no fusion and no loop takes it
    made = re.findall(rf"= \(?{pool}\S* ([\w-]+)\(", entry)
    assert set(made) == {"parameter", "custom-call"} | ({"bitcast"} & set(made))
    assert made.count("parameter") == made.count("custom-call") == LAYERS


@pytest.mark.parametrize(("kind", "chip", "tensor"), CASES)
def test_the_state_is_written_in_place(kind, chip, tensor):
    found = step(kind, chip, tensor)
    pool = LAYERS * SERVING.pages * 2 * found.config.kv_heads // tensor * SERVING.page_size * found.config.head_dim * 2
    assert found.program.alias_bytes >= pool
    assert found.program.temporary_bytes < pool / LAYERS


def test_a_model_that_one_chip_does_not_hold_is_spread_and_one_that_does_not_fit_is_a_fault():
    serving = Serving()
    assert [devices_for(config_of(MODEL), serving, chip) for chip in GENERATIONS] == [4, 4, 1, 1, 1]
    assert {devices_for(config_of("smollm2-135m"), serving, chip) for chip in GENERATIONS} == {1}
    outcome = run(StepJob("no-such-model", "decode", serving), "v5e")
    assert outcome.fault == "ValueError: no model 'no-such-model'; expected one of smollm2-135m, llama3.1-8b"
