"""What becomes a request, and what is refused at the door and how."""

import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import LLM, FinishReason, SamplingParams
from jaxinfer.assembly import recommended_params
from jaxinfer.engine.compilation import compile_counter
from jaxinfer.errors import BadSamplingParam, PromptTooLong, RequestError

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture
def llm(fresh_llm: LLM) -> LLM:
    return fresh_llm


@pytest.mark.parametrize("token", [-1, 448, 2**31, 2**32 + 5, 2**63])
def test_prompt_ids_outside_the_vocabulary_are_refused_by_value(llm, token):
    with pytest.raises(RequestError, match=rf"prompt token is {token}; expected .* to 447"):
        llm.generate([[1, token, 2]], GREEDY)


@pytest.mark.parametrize("token", [-1, 448, 2**31, 2**63])
def test_stop_and_bias_ids_outside_the_vocabulary_are_refused_by_name(llm, token):
    with pytest.raises(BadSamplingParam, match=rf"stop_token_ids.* {token}"):
        llm.stream("bell", SamplingParams(stop_token_ids=(token,)))
    with pytest.raises(BadSamplingParam, match=rf"logit_bias.* {token}"):
        llm.stream("bell", SamplingParams(logit_bias={token: 1.0}))
    llm.assembly.request("bell", SamplingParams(stop_token_ids=(447,), logit_bias={447: 1.0}))


def test_calls_without_parameters_take_the_assembly_s(llm):
    """Its defaults are ours, which change no distribution, unless the checkpoint's were asked for."""
    assert llm.assembly.defaults == SamplingParams()
    greedy = LLM(replace(llm.assembly, defaults=GREEDY))
    (expected,) = llm.generate(["bell"], GREEDY)
    assert greedy.generate(["bell"])[0].token_ids == expected.token_ids
    assert "".join(delta.text for delta in greedy.stream("bell")) == expected.text


def test_recommended_parameters_are_ours_where_the_checkpoint_says_nothing():
    assert recommended_params({}) == SamplingParams()
    assert recommended_params({"top_k": 5, "temperature": 0.5}) == SamplingParams(top_k=5, temperature=0.5)


@pytest.mark.parametrize("prompt", [[], (), [1, True], [1, 2.0], [1, "2"], {"role": "user"}, b"bytes", None, 5, [[1]]])
def test_prompts_of_the_wrong_kind_are_refused(llm, prompt):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate([prompt], GREEDY)


def test_arrays_of_ids_are_prompts_and_compile_nothing(llm):
    ids = np.arange(1, 38, dtype=np.int32)
    on_device = jax.device_put(ids)
    before = compile_counter().count
    for array in (ids, on_device):
        assert llm.assembly.tokenize(array) == tuple(range(1, 38))
    assert compile_counter().count == before
    for wrong in (ids.astype(float), ids > 0, ids[None], np.array(7)):
        with pytest.raises(RequestError, match="prompt"):
            llm.assembly.tokenize(wrong)


def test_half_a_surrogate_pair_is_the_callers_fault(llm):
    with pytest.raises(RequestError, match="surrogate"):
        llm.stream("a\ud800b")


def test_messages_without_a_template_are_refused(llm):
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_a_prompt_of_the_whole_context_is_refused_with_both_numbers(llm):
    with pytest.raises(PromptTooLong, match=r"96 tokens .* context of 96 tokens"):
        llm.generate([[5] * 96], GREEDY)
    (output,) = llm.generate([[5] * 95], replace(GREEDY, ignore_eos=True))
    assert (len(output.token_ids), output.finish) == (1, FinishReason.LENGTH)


def test_max_tokens_beyond_the_context_ends_where_the_context_does(llm):
    (output,) = llm.generate([[5] * 90], SamplingParams(max_tokens=10**6, temperature=0.0, ignore_eos=True))
    assert (len(output.token_ids), output.finish) == (6, FinishReason.LENGTH)


def test_too_many_stop_ids_are_refused(llm):
    crowded = replace(llm.assembly, eos_ids=frozenset(range(10, 20)))
    with pytest.raises(BadSamplingParam, match="18 ids"):
        crowded.request("bell", SamplingParams(stop_token_ids=tuple(range(100, 108))))


def test_nothing_is_run_when_one_prompt_is_bad(llm):
    with pytest.raises(RequestError):
        llm.generate(["fine", []], GREEDY)
    assert llm.assembly.loop.stats().steps == 0


# ---- the request that is made ----------------------------------------------------------------------------------------


def test_stop_ids_are_the_models_and_the_callers(llm):
    eos = llm.assembly.eos_ids
    assert llm.assembly.request("bell", SamplingParams(stop_token_ids=(7,))).stop_ids == eos | {7}
    assert llm.assembly.request("bell", SamplingParams(stop_token_ids=(7,), ignore_eos=True)).stop_ids == {7}


def test_a_request_has_a_seed_an_id_and_its_time(llm):
    before = time.monotonic()
    first, second = (llm.assembly.request("bell", GREEDY) for _ in range(2))
    assert first.seed != second.seed
    assert first.id != second.id
    assert before <= first.arrival <= second.arrival <= time.monotonic()
    given = llm.assembly.request("bell", replace(GREEDY, seed=3), request_id="mine", priority=2, cache_salt="s")
    assert (given.seed, given.id, given.priority, given.cache_salt) == (3, "mine", 2, "s")
    for wrong in ({"priority": 2**31}, {"priority": 1.5}, {"cache_salt": "x" * 257}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            llm.assembly.request("bell", GREEDY, **wrong)


def test_a_spelled_out_bos_is_not_doubled(llm):
    bos = llm.assembly.tokenizer.bos_id
    spelled = llm.assembly.tokenizer.decode([bos], skip_special=False)
    assert llm.assembly.tokenize(f"{spelled}bell").count(bos) == 1
    assert llm.assembly.tokenize("bell").count(bos) == 1
