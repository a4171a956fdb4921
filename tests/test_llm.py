"""The Python door on the tests' checkpoint: every way to ask gives the same tokens."""

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer import LLM, EngineConfig, FinishReason, SamplingParams
from jaxinfer.errors import RequestError
from jaxinfer.text.chat import ChatTemplate

from .llm_cases import GREEDY, PROMPTS, one_by_one


@pytest.fixture
def llm(fresh_llm: LLM) -> LLM:
    return fresh_llm


def joined(stream) -> str:
    return "".join(delta.text for delta in stream)


def test_many_prompts_come_back_in_order_and_each_as_it_would_alone(llm):
    together = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in together] == one_by_one(llm, PROMPTS, GREEDY)
    assert [output.prompt_token_ids for output in together] == [llm.assembly.tokenize(text) for text in PROMPTS]


def test_a_queue_smaller_than_the_prompts_is_fed_as_it_drains(llm):
    many = PROMPTS * 5  # and 8 may wait
    assert [output.token_ids for output in llm.generate(many, GREEDY)] == one_by_one(llm, many, GREEDY)


def test_streamed_text_joined_is_the_one_shot_text(llm):
    for prompt, seed in zip(PROMPTS, range(10), strict=False):
        params = SamplingParams(max_tokens=24, temperature=3.0, seed=seed, stop=("the", "ér"))
        whole = llm.generate([prompt], params)[0]
        deltas = list(llm.stream(prompt, params))
        assert "".join(delta.text for delta in deltas) == whole.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
        assert [delta.finish for delta in deltas if delta.finish] == [whole.finish]
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.completion_tokens == whole.usage.completion_tokens == len(whole.token_ids)


def test_ids_arrays_and_text_are_the_same_prompt(llm):
    ids = llm.assembly.tokenize("By day the people")
    asked = ["By day the people", ids, list(ids), np.array(ids, np.int32)]
    assert len({output.token_ids for output in llm.generate(asked, GREEDY)}) == 1


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [replace(GREEDY, max_tokens=count) for count in (1, 5, 3)]
    outputs = llm.generate(["bell", "bell", "bell"], params)
    assert [len(output.token_ids) for output in outputs] == [1, 5, 3]
    assert outputs[1].token_ids[:3] == outputs[2].token_ids
    with pytest.raises(RequestError, match="2 params for 3 prompts"):
        llm.generate(["a", "b", "c"], params[:2])


def test_a_lone_string_is_one_prompt_and_no_prompts_give_no_outputs(llm):
    assert llm.generate("bell", GREEDY)[0].token_ids == llm.generate(["bell"], GREEDY)[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_a_seed_repeats_and_no_seed_does_not(llm):
    hot = SamplingParams(max_tokens=16, temperature=50.0, ignore_eos=True)
    seeded = replace(hot, seed=5)
    alone = llm.generate(["bell"], seeded)[0].token_ids
    beside = llm.generate(["one", "bell", "By day"], [hot, seeded, hot])[1].token_ids
    assert alone == beside
    first, second = llm.generate(["bell", "bell"], hot)
    assert first.token_ids != second.token_ids


def test_choices_differ_and_are_counted_together(llm):
    params = SamplingParams(max_tokens=8, temperature=50.0, n=3, seed=1, ignore_eos=True)
    output = llm.generate(["bell"], params)[0]
    assert [choice.index for choice in output.choices] == [0, 1, 2]
    assert len({choice.token_ids for choice in output.choices}) == 3
    assert output.usage.completion_tokens == 24
    assert output.usage.prompt_tokens == len(output.prompt_token_ids)
    ends = [delta.choice for delta in llm.stream("bell", params) if delta.finish]
    assert sorted(ends) == [0, 1, 2]


def test_timing_has_a_gap_for_every_token_after_the_first(llm):
    output = llm.generate(["bell"], replace(GREEDY, ignore_eos=True))[0]
    assert len(output.timing.itl) == len(output.token_ids) - 1
    assert 0 <= output.timing.queue <= output.timing.ttft


def test_logprobs_come_one_a_token_and_spell_the_text(llm):
    output = llm.generate(["a 🙂 and"], replace(GREEDY, logprobs=2, ignore_eos=True))[0]
    assert tuple(entry.token for entry in output.logprobs) == output.token_ids
    assert b"".join(entry.bytes for entry in output.logprobs).decode(errors="replace") == output.text
    for entry in output.logprobs:
        assert len(entry.top) == 2
        assert entry.logprob == entry.top[0].logprob  # greedy takes the best


def test_chat_goes_through_the_template(fresh_llm):
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[answer]"
    tokenizer = fresh_llm.assembly.tokenizer
    llm = LLM(replace(fresh_llm.assembly, chat=ChatTemplate(template, tokenizer)))
    messages = [{"role": "user", "content": "By day"}]
    said = llm.chat(messages, GREEDY)
    assert said.token_ids == llm.generate([said.prompt_token_ids], GREEDY)[0].token_ids
    assert joined(llm.stream(messages, GREEDY)) == said.text
    assert said.prompt_token_ids.count(tokenizer.bos_id) == 1


def test_the_demo_model_says_what_it_always_said(demo_path):
    """In float32; transformers on the decoded weights says the same."""
    engine = EngineConfig(slots=1, context=64, chunk=64)
    output = LLM.load(str(demo_path), engine, progress=False).generate(
        ["The capital of France is"], SamplingParams(max_tokens=40, temperature=0.0)
    )[0]
    assert output.text == " Paris.\n\nThe answer is: 2018-01-22 12:12:53."
    assert output.prompt_token_ids == (504, 3575, 282, 4649, 314)
    assert output.token_ids[:8] == (7042, 30, 198, 198, 504, 2988, 314, 42)
    assert (output.token_ids[-1], len(output.token_ids), output.finish) == (2, 30, FinishReason.STOP)
