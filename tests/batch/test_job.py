"""One record for each line, in order, with what `generate` gives in it."""

import io
import json
from dataclasses import replace

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.batch.job import run
from jaxinfer.batch.journal import Pipe
from jaxinfer.errors import EngineFault
from jaxinfer.request import SampledToken
from jaxinfer.scheduler.loop import EngineLoop

DEFAULTS = SamplingParams(max_tokens=6, temperature=0.0)


def run_bytes(llm: LLM, data: bytes, defaults: SamplingParams = DEFAULTS) -> list[dict]:
    out = io.BytesIO()
    summary = run(llm, io.BytesIO(data), Pipe(out), defaults, names={"demo"})
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert summary.lines == len(records)
    assert summary.failed == sum(record["error"] is not None for record in records)
    return records


def run_lines(llm: LLM, *lines: dict) -> list[dict]:
    return run_bytes(llm, b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def openai(url: str, body: dict, **more) -> dict:
    return {"custom_id": "c", "method": "POST", "url": f"/v1/{url}", "body": body, **more}


def test_records_come_in_input_order_with_errors_in_their_place(llm):
    lines = [
        b'{"prompt": "Once, on a river", "id": 1, "max_tokens": 40, "ignore_eos": true}',
        b"not json",
        b'{"prompt": "bell", "id": 2, "max_tokens": 1}',
        b'{"prompt": [1, 448], "id": 3}',
        b'{"prompt": "", "id": 4}',
        b'{"prompt": "By day", "id": 5, "nonsense": 1}',
        b'{"prompt": "\\ud800", "id": "\\ud800"}',
        b'{"prompt": "By day", "id": 5}',
    ] * 4
    records = run_bytes(llm, b"\n".join(lines))
    assert len(records) == len(lines)
    assert [record["id"] for record in records[:8]] == [1, "line-2", 2, 3, 4, 5, "\ud800", 5]
    failed = [index for index, record in enumerate(records) if record["error"]]
    assert failed == [8 * block + place for block in range(4) for place in (1, 3, 5, 6)]
    assert records[0]["text"] == llm.generate(["Once, on a river"], SamplingParams(40, 0, 0.0, ignore_eos=True))[0].text
    assert "448" in records[3]["error"]["message"]
    assert [records[i]["text"] for i in (7, 15, 23, 31)] == [llm.generate(["By day"], DEFAULTS)[0].text] * 4


def test_an_empty_file_gives_an_empty_file(llm):
    for data in (b"", b"\n\r\n", b"\xef\xbb\xbf"):
        assert run_bytes(llm, data) == []


def test_a_prompt_that_the_pool_can_never_hold_is_an_error_in_its_line(tiny_llm):

    assembly = tiny_llm.assembly

    class Small:
        """The engine with a pool of four pages of 16 tokens."""

        limits = replace(assembly.runner.limits, pages=4)
        dispatch, fetch = assembly.runner.dispatch, assembly.runner.fetch

    llm = LLM(replace(assembly, loop=EngineLoop(Small(), queue=8, prefix_cache=True)))
    refused, answered = run_lines(llm, {"prompt": [5] * 80}, {"prompt": "bell"})
    assert "page pool" in refused["error"]["message"]
    assert answered["error"] is None


def test_a_line_whose_logits_are_no_numbers_is_an_error_in_its_place(tiny_llm):
    class Sick:
        """The engine, whose logits are no numbers after a prompt that holds token 7."""

        limits = tiny_llm.assembly.runner.limits

        def dispatch(self, plan):
            sick = [7 in chunk.tokens for chunk in plan.prefills if chunk.samples]
            return sick, tiny_llm.assembly.runner.dispatch(plan)

        def fetch(self, handle):
            sick, tokens = handle[0], tiny_llm.assembly.runner.fetch(handle[1])
            firsts = [SampledToken(-1) if ill else token for ill, token in zip(sick, tokens.prefills, strict=True)]
            return replace(tokens, prefills=tuple(firsts))

    llm = LLM(replace(tiny_llm.assembly, loop=EngineLoop(Sick(), queue=8, prefix_cache=True)))
    ill = [{"prompt": [5, 7]}, openai("completions", {"prompt": [5, 7]})]
    before, plain, wire, after = run_lines(llm, {"prompt": [5]}, *ill, {"prompt": [5]})
    assert (before["error"], after["error"]) == (None, None)
    assert plain["error"]["code"] == wire["error"]["code"] == "engine_error"
    assert "not finite" in plain["error"]["message"]
    assert wire["response"]["status_code"] == 500


def test_an_engine_that_broke_ends_the_job(tiny_llm):
    class Broken:
        limits, fetch = tiny_llm.assembly.runner.limits, None

        def dispatch(self, plan):
            raise RuntimeError("out of memory")

    llm = LLM(replace(tiny_llm.assembly, loop=EngineLoop(Broken(), queue=8, prefix_cache=True)))
    with pytest.raises(EngineFault):
        run_lines(llm, {"prompt": [5]}, {"prompt": [6]})


def test_a_plain_record_holds_what_generate_gave(llm):
    (record,) = run_lines(llm, {"prompt": "bell", "id": "x", "n": 2, "seed": 3, "temperature": 9.0, "logprobs": 1})
    whole = llm.generate(["bell"], replace(DEFAULTS, n=2, seed=3, temperature=9.0, logprobs=1))[0]
    assert [choice["token_ids"] for choice in record["choices"]] == [list(c.token_ids) for c in whole.choices]
    assert record["text"] == whole.text
    assert record["finish_reason"] == whole.finish.value
    assert [entry["logprob"] for entry in record["logprobs"]] == [entry.logprob for entry in whole.logprobs]
    assert record["usage"]["completion_tokens"] == whole.usage.completion_tokens


def test_a_completion_line_gets_openai_s_answer(llm):
    body = {"model": "demo", "prompt": ["bell", "By day"], "n": 2, "seed": 1, "temperature": 9.0, "logprobs": 2}
    (record,) = run_lines(llm, openai("completions", body))
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("c", None, 200)
    answer = record["response"]["body"]
    assert answer["object"] == "text_completion"
    wholes = llm.generate(["bell", "By day"], replace(DEFAULTS, n=2, seed=1, temperature=9.0, logprobs=2))
    expected = [choice for whole in wholes for choice in whole.choices]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]  # i * n + j
    assert [choice["text"] for choice in answer["choices"]] == [choice.text for choice in expected]
    assert answer["usage"]["completion_tokens"] == sum(choice.usage.completion_tokens for choice in expected)
    assert answer["usage"]["prompt_tokens"] == sum(len(whole.prompt_token_ids) for whole in wholes)
    for choice, made in zip(answer["choices"], expected, strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [entry.logprob for entry in made.logprobs]
        assert {len(column) for column in logprobs.values()} == {len(made.token_ids)}


def test_a_chat_line_gets_openai_s_answer(llm):
    messages = [{"role": "user", "content": "By day"}]
    body = {"messages": messages, "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2}
    (record,) = run_lines(llm, openai("chat/completions", body))
    answer = record["response"]["body"]
    whole = llm.chat(messages, replace(DEFAULTS, max_tokens=5, logprobs=2))
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": whole.text}
    assert choice["finish_reason"] == whole.finish.value
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace") == whole.text
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_a_refused_openai_line_has_an_error_and_a_400(llm):
    (record,) = run_lines(llm, openai("completions", {"prompt": "bell", "nonsense": 1}))
    assert record["custom_id"] == "c"
    assert "nonsense" in record["error"]["message"]
    assert record["response"]["status_code"] == 400


def test_the_bar_counts_lines_and_tokens(llm, capsys):
    data = b'{"prompt": "bell"}\n{"prompt": "By day"}\n'
    run(llm, io.BytesIO(data), Pipe(io.BytesIO()), DEFAULTS, names=set(), total=2, progress=True)
    last = capsys.readouterr().err.split("\r")[-1]
    assert "2/2" in last
    assert "tok/s" in last
    assert "0.0 tok/s" not in last


def test_a_file_is_read_only_as_far_as_the_window(llm):
    """A million lines must not be read, and not be answered, ahead of the first."""
    lines = iter(range(10**6))
    read = []

    class Endless(io.BytesIO):
        def readline(self, size=-1):
            read.append(next(lines))
            return b'{"prompt": "bell", "max_tokens": 2}\n'

    class Full(Exception):
        pass

    class First(Pipe):
        def append(self, record):
            raise Full

    with pytest.raises(Full):
        run(llm, Endless(), First(io.BytesIO()), DEFAULTS, names=set())
    assert len(read) <= 16 * llm.assembly.engine.slots + 1
