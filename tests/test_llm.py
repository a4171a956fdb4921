"""The Python door on the tests' checkpoint: every way to ask gives the same tokens, and giving up frees everything."""

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, zip_longest

import numpy as np
import pytest

from jaxinfer import LLM, CacheConfig, Delta, EngineConfig, FinishReason, SamplingParams
from jaxinfer.assembly import Assembly
from jaxinfer.errors import BadSamplingParam, EngineFault, PromptTooLong, RequestError
from jaxinfer.scheduler.loop import EngineLoop
from jaxinfer.text.chat import ChatTemplate

ENGINE = EngineConfig(slots=4, context=96, chunk=32, cache=CacheConfig(page_size=16, pages=24))
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
PROMPTS = [
    "Once, on a river",
    "By day",
    "The night",
    "bell",
    "a 🙂 and 한국어",
    "one",
    "over full. One crossing carried",
]


@pytest.fixture(scope="module")
def assembly(tiny_path) -> Assembly:
    return LLM.load(str(tiny_path), ENGINE, progress=False).assembly


@pytest.fixture
def llm(assembly) -> Iterator[LLM]:
    """A fresh loop over the warm engine; nothing may be left behind in it."""
    llm = with_loop(assembly)
    yield llm
    assert_idle(llm)


def with_loop(assembly: Assembly, *, queue: int = 64) -> LLM:
    return LLM(replace(assembly, loop=EngineLoop(assembly.runner, queue=queue, prefix_cache=True)))


def assert_idle(llm: LLM) -> None:
    loop = llm.assembly.loop
    loop.check()
    stats = loop.stats()
    assert (stats.waiting, stats.running, stats.free_pages) == (0, 0, stats.total_pages)


def one_by_one(llm: LLM, prompts, params: SamplingParams) -> list[tuple[int, ...]]:
    return [llm.generate([prompt], params)[0].token_ids for prompt in prompts]


def joined(stream) -> str:
    return "".join(delta.text for delta in stream)


# ---- the same tokens, whichever way ----------------------------------------------------------------------------------


def test_many_prompts_come_back_in_order_and_each_as_it_would_alone(llm):
    together = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in together] == one_by_one(llm, PROMPTS, GREEDY)
    assert [output.prompt_token_ids for output in together] == [llm.assembly.tokenize(text) for text in PROMPTS]


def test_a_queue_smaller_than_the_prompts_is_fed_as_it_drains(assembly):
    llm = with_loop(assembly, queue=1)
    assert [o.token_ids for o in llm.generate(PROMPTS * 2, GREEDY)] == one_by_one(llm, PROMPTS * 2, GREEDY)
    assert_idle(llm)


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


def test_chat_goes_through_the_template(assembly):
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[answer]"
    llm = LLM(replace(with_loop(assembly).assembly, chat=ChatTemplate(template, assembly.tokenizer)))
    messages = [{"role": "user", "content": "By day"}]
    said = llm.chat(messages, GREEDY)
    assert said.token_ids == llm.generate([said.prompt_token_ids], GREEDY)[0].token_ids
    assert joined(llm.stream(messages, GREEDY)) == said.text
    assert said.prompt_token_ids.count(assembly.tokenizer.bos_id) == 1


# ---- streams that overlap or are given up ----------------------------------------------------------------------------


def test_generate_inside_an_open_stream_disturbs_neither(llm):
    alone, inner = one_by_one(llm, ["Once, on a river", "By day"], GREEDY)
    tokens = []
    for delta in llm.stream("Once, on a river", GREEDY):
        tokens += delta.token_ids
        assert llm.generate(["By day"], GREEDY)[0].token_ids == inner
    assert tuple(tokens) == alone


def test_streams_read_in_turns_are_each_whole(llm):
    alone = [output.text for output in llm.generate(PROMPTS[:3], GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:3]]
    rows = list(zip_longest(*streams, fillvalue=Delta(0)))  # a delta of each, in turns
    assert ["".join(delta.text for delta in column) for column in zip(*rows, strict=True)] == alone
    assert len(rows) > 1


def test_leaving_a_stream_frees_its_pages_at_once(llm):
    long = replace(GREEDY, max_tokens=60, ignore_eos=True)
    for _ in llm.stream("Once, on a river", long):
        break
    assert_idle(llm)
    unread = llm.stream("Once, on a river", long)
    del unread
    assert_idle(llm)
    with llm.stream("Once, on a river", long) as stream:
        next(stream)
    assert_idle(llm)
    assert list(stream) == []
    stream.close()


def test_leaving_one_stream_leaves_the_others_running(llm):
    alone = llm.generate(["By day"], GREEDY)[0].text
    left, kept = llm.stream("Once, on a river", GREEDY), llm.stream("By day", GREEDY)
    first = next(kept).text
    next(left)
    left.close()
    assert first + joined(kept) == alone


def test_an_exception_in_the_middle_of_generate_frees_everything(llm, monkeypatch):
    step, calls = llm.assembly.loop.step, count()

    def interrupted():
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.assembly.loop, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert_idle(llm)


def test_ctrl_c_inside_a_step_waits_for_its_end(llm, monkeypatch):
    alone = llm.generate(["By day"], GREEDY)[0].text
    runner = llm.assembly.runner
    fetch, pressed = runner.fetch, []

    def pressing(handle):
        if not pressed:
            pressed.append(signal.raise_signal(signal.SIGINT))
        return fetch(handle)

    monkeypatch.setattr(runner, "fetch", pressing)
    stream = llm.stream("By day", GREEDY)
    texts = []
    with pytest.raises(KeyboardInterrupt):
        texts.extend(delta.text for delta in stream)
    llm.assembly.loop.check()
    assert "".join(texts) + joined(stream) == alone  # the step that was interrupted lost nothing
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_broken_engine_raises_and_stays_broken(assembly, monkeypatch):
    llm = with_loop(assembly)

    def broken(plan):
        raise ValueError("no such device")

    with monkeypatch.context() as patch:
        patch.setattr(assembly.runner, "dispatch", broken)
        with pytest.raises(EngineFault):
            llm.generate(["bell"], GREEDY)
    with pytest.raises(EngineFault, match="restart"):
        llm.generate(["bell"], GREEDY)
    assert with_loop(assembly).generate(["bell"], GREEDY)[0].text


# ---- what is refused -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("prompt", [[], (), [1, True], [1, 2.0], [1, "2"], {"role": "user"}, b"bytes", None, 5, [[1]]])
def test_prompts_of_the_wrong_kind_are_refused(llm, prompt):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate([prompt], GREEDY)


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


def test_too_many_stop_ids_are_refused(llm, assembly):
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
