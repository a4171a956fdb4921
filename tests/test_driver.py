"""Streams that overlap, break or are given up: each is whole, and nothing is left behind."""

import signal
from dataclasses import replace
from itertools import count, zip_longest

import pytest

from jaxinfer import LLM, Delta
from jaxinfer.errors import EngineFault

from .llm_cases import GREEDY, PROMPTS, one_by_one


@pytest.fixture
def llm(fresh_llm: LLM) -> LLM:
    return fresh_llm


def assert_idle(loop) -> None:
    loop.check()
    stats = loop.stats()
    assert (stats.waiting, stats.running, stats.free_pages) == (0, 0, stats.total_pages)


def joined(stream) -> str:
    return "".join(delta.text for delta in stream)


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
    assert_idle(llm.assembly.loop)
    unread = llm.stream("Once, on a river", long)
    del unread
    assert_idle(llm.assembly.loop)
    with llm.stream("Once, on a river", long) as stream:
        next(stream)
    assert_idle(llm.assembly.loop)
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
    assert_idle(llm.assembly.loop)


def test_an_interrupt_while_a_job_is_still_being_queued_frees_all_of_it(llm, monkeypatch):
    step, calls = llm.assembly.loop.step, count()

    def interrupted():
        if next(calls) == 0:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.assembly.loop, "step", interrupted)
    requests = [llm.assembly.request("bell", GREEDY) for _ in range(20)]  # more than the queue holds
    with pytest.raises(KeyboardInterrupt):
        list(llm.driver.run_in_order([("job", requests)], window=1))
    assert_idle(llm.assembly.loop)


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


def test_a_broken_engine_raises_and_stays_broken(llm, tiny_llm, monkeypatch):
    def broken(plan):
        raise ValueError("no such device")

    with monkeypatch.context() as patch:
        patch.setattr(llm.assembly.runner, "dispatch", broken)
        with pytest.raises(EngineFault):
            llm.generate(["bell"], GREEDY)
    with pytest.raises(EngineFault, match="restart"):
        llm.generate(["bell"], GREEDY)
    assert tiny_llm.generate(["bell"], GREEDY)[0].text
