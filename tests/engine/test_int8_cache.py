"""Keys and values in int8: a chunk reads its own keys as later ones will, so cutting a prompt changes nothing."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer.config import MeshConfig
from jaxinfer.engine import runner as runner_module
from jaxinfer.engine.runner import EngineRunner
from jaxinfer.plan import StepPlan
from jaxinfer.request import SamplingParams

from .driver import ENGINE, GREEDY, MODEL, VOCAB, Seq, generate, ids, make_runner, prompt, run

INT8 = replace(ENGINE, cache=replace(ENGINE.cache, dtype="int8"))
SEEDED = SamplingParams(temperature=1.0, logprobs=20)


@pytest.fixture(scope="module")
def quantised():
    return make_runner(INT8)


def logprobs(tokens):
    return [token.logprob for token in tokens]


@pytest.mark.parametrize("chunks", [(8, None), (5, 1, 7, None), (1,) * 29 + (None,)])
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_chunked_prefill_equals_whole(quantised, chunks, params):
    (whole,) = generate(quantised, [Seq(prompt(30), 0, params)], 6)
    (chunked,) = generate(quantised, [Seq(prompt(30), 0, params)], 6, chunks=chunks)
    assert ids(chunked) == ids(whole)
    np.testing.assert_allclose(logprobs(chunked), logprobs(whole), atol=1e-4)


def test_decode_equals_prefill_of_the_same_tokens(quantised):
    (decoded,) = generate(quantised, [Seq(prompt(10), 0)], 8)
    for count in (1, 4, 8):
        (prefilled,) = generate(quantised, [Seq(prompt(10) + ids(decoded)[:count], 1)], 0)
        assert ids(prefilled) == ids(decoded)[count : count + 1]
        np.testing.assert_allclose(logprobs(prefilled), logprobs(decoded)[count : count + 1], atol=1e-4)


def test_int8_is_near_float32_and_is_not_float32(quantised, runner):
    exact, rounded = (generate(engine, [Seq(prompt(30), 0)], 0)[0] for engine in (runner, quantised))
    np.testing.assert_allclose(logprobs(rounded), logprobs(exact), atol=0.1)
    assert logprobs(rounded) != logprobs(exact)


def test_batched_equals_alone_bit_by_bit(quantised):
    (alone,) = generate(quantised, [Seq(prompt(20), 0, SEEDED)], 8)
    others = [Seq(prompt(9 + i, i), i, SEEDED, seed=i) for i in (0, 1, 3)]
    assert generate(quantised, [*others[:2], Seq(prompt(20), 2, SEEDED), others[2]], 8)[2] == alone


def test_every_step_donates_numbers_and_scales_and_compiles_nothing(quantised):
    before, sequence = quantised.compilations["serving"], Seq(prompt(9), 0, SEEDED)
    for make in (
        lambda: StepPlan(seats=(sequence.seat(),)),
        lambda: StepPlan(prefills=(sequence.chunk(),)),
        lambda: StepPlan(decodes=(sequence.decode(),)),
    ):
        leaves = jax.tree.leaves(quantised._state)
        assert sum(leaf.dtype == np.int8 for leaf in leaves) == MODEL.layers
        run(quantised, make())
        assert all(leaf.is_deleted() for leaf in leaves)
    assert quantised.compilations["serving"] == before


def test_what_was_never_written_is_never_read(quantised):
    """NaN in every scale of the pool is not seen by a sequence that starts over."""
    (expected,) = generate(quantised, [Seq(prompt(20), 0, SEEDED)], 8)
    broken = [pages._replace(scales=pages.scales * np.nan) for pages in quantised._state.pages]
    quantised._state = quantised._state._replace(pages=tuple(broken))
    (tokens,) = generate(quantised, [Seq(prompt(20), 0, SEEDED)], 8)
    assert tokens == expected


def test_two_devices_equal_one(quantised):
    sharded = make_runner(replace(INT8, mesh=MeshConfig(tensor=2)))
    one, two = (generate(engine, [Seq(prompt(20, i), i) for i in range(3)], 6) for engine in (quantised, sharded))
    for expected, got in zip(one, two, strict=True):
        assert ids(got) == ids(expected)
        np.testing.assert_allclose(logprobs(got), logprobs(expected), atol=1e-4)
    for leaf in sharded._state.pages[0]:
        assert [shard.data.size * 2 for shard in leaf.addressable_shards] == [leaf.size] * 2


def test_pages_that_are_asked_for_need_no_report_of_the_memory(runner, monkeypatch):
    monkeypatch.setattr(runner_module, "pool_bytes", lambda *_: pytest.fail("asked for the memory"))
    built = EngineRunner.build(MODEL, runner._params, INT8, vocab_size=VOCAB)
    assert built.limits.pages == INT8.cache.pages
