"""Batch files: lines of every kind in, one record each out, in order, whatever happens in between."""

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jaxinfer import LLM, CacheConfig, EngineConfig, SamplingParams
from jaxinfer.assembly import Assembly
from jaxinfer.batch.job import run, run_file, run_pipe
from jaxinfer.batch.journal import Journal, Pipe
from jaxinfer.batch.lines import MAX_LINE_BYTES, Line, parse_line, read_lines
from jaxinfer.errors import RequestError
from jaxinfer.scheduler.loop import EngineLoop
from jaxinfer.text.chat import ChatTemplate

ENGINE = EngineConfig(slots=4, context=96, chunk=32, cache=CacheConfig(page_size=16, pages=24))
DEFAULTS = SamplingParams(max_tokens=6, temperature=0.0)
FLAGS = {"slots": 4, "context": 96, "chunk": 32, "page-size": 16, "pages": 24, "temperature": 0}
"""The same on the command line: the executables then come from the cache."""
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[answer]"


@pytest.fixture(scope="module")
def assembly(tiny_path) -> Assembly:
    return LLM.load(str(tiny_path), ENGINE, progress=False).assembly


@pytest.fixture
def llm(assembly) -> Iterator[LLM]:
    loop = EngineLoop(assembly.runner, queue=8, prefix_cache=True)
    yield LLM(replace(assembly, loop=loop, chat=ChatTemplate(TEMPLATE, assembly.tokenizer)))
    loop.check()
    assert loop.stats().free_pages == loop.stats().total_pages


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


def parsed(line: dict | bytes):
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    return parse_line(Line(1, data), DEFAULTS, lambda name: name == "demo")


# ---- reading lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"a\nb\n", b"a\nb", b"a\r\nb\r\n", b"\xef\xbb\xbfa\nb\n", b"\n\na\n   \n\r\nb\n\n", b"\xef\xbb\xbf\na\nb"]
)
def test_line_ends_marks_and_blank_lines_make_no_difference(data):
    assert [line.data.strip() for line in read_lines(io.BytesIO(data))] == [b"a", b"b"]


def test_lines_are_numbered_as_an_editor_does():
    assert [line.number for line in read_lines(io.BytesIO(b"\n\na\n\nb"))] == [3, 5]


def test_a_line_without_end_is_cut_and_refused_and_the_next_one_is_read():
    data = b'"' + b"x" * (2 * MAX_LINE_BYTES) + b'"\n{"prompt": "a"}'
    first, second = read_lines(io.BytesIO(data))
    assert len(first.data) == MAX_LINE_BYTES + 1
    assert "longer than" in parsed(first.data).error
    assert parsed(second.data).prompts == ("a",)


# ---- reading one line ------------------------------------------------------------------------------------------------

GOOD = {"prompt": "bell"}
REFUSED = {
    b"{": "no JSON",
    b"[1]": "list",
    b'{"prompt": "\xff"}': "UTF-8",
    b'{"prompt": "a", "top_p": NaN}': "NaN",
    b"[" * 100_000: "no JSON",
    b'{"prompt": "a", "logit_bias": {"' + b"9" * 5000 + b'": 1}}': "logit_bias",
    b'{"prompt": "a", "logit_bias": {"2147483648": 1}}': "logit_bias",
    b'{"prompt": "a", "logit_bias": {"1.5": 1}}': "logit_bias",
}


@pytest.mark.parametrize(("data", "reason"), REFUSED.items(), ids=range(len(REFUSED)))
def test_damaged_lines_are_refused_with_a_reason(data, reason):
    ask = parsed(data)
    assert reason in ask.error
    assert ask.prompts == ()
    assert len(ask.error) < 1_000


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ({}, "prompt"),
        ({**GOOD, "messages": []}, "exactly one"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({**GOOD, "temprature": 1}, "temprature"),
        ({**GOOD, "temprature": None}, "temprature"),
        ({**GOOD, "temperature": "1"}, "temperature"),
        ({**GOOD, "max_tokens": 0}, "max_tokens"),
        ({**GOOD, "max_tokens": 5.0}, "max_tokens"),
        ({**GOOD, "max_tokens": True}, "max_tokens"),
        ({**GOOD, "top_p": 0}, "top_p"),
        ({**GOOD, "stop": 5}, "stop"),
        ({**GOOD, "stop": [""]}, "stop"),
        ({**GOOD, "stop_token_ids": 5}, "stop_token_ids"),
        ({**GOOD, "stop_token_ids": [-1]}, "stop_token_ids"),
        ({**GOOD, "logit_bias": [1]}, "logit_bias"),
        ({**GOOD, "logit_bias": {"5": "x"}}, "logit_bias"),
        ({**GOOD, "ignore_eos": "no"}, "ignore_eos"),
        ({**GOOD, "seed": 2**63}, "seed"),
        ({**GOOD, "id": [1]}, "id"),
        ({**GOOD, "id": True}, "id"),
        ({"custom_id": "a"}, "url"),
        (openai("embeddings", GOOD), "url"),
        (openai("completions", GOOD, method="GET"), "method"),
        (openai("completions", GOOD, extra=1), "extra"),
        ({**openai("completions", GOOD), "custom_id": 5}, "custom_id"),
        ({**openai("completions", GOOD), "custom_id": ""}, "custom_id"),
        (openai("completions", []), "body"),
        (openai("completions", {}), "prompt"),
        (openai("completions", {"prompt": []}), "prompt"),
        (openai("completions", {"prompt": {}}), "prompt"),
        (openai("completions", {**GOOD, "model": "gpt-9"}), "gpt-9"),
        (openai("completions", {**GOOD, "stream": True}), "stream"),
        (openai("completions", {**GOOD, "echo": True}), "echo"),
        (openai("completions", {**GOOD, "suffix": "x"}), "suffix"),
        (openai("completions", {**GOOD, "best_of": 2}), "best_of"),
        (openai("completions", {**GOOD, "tools": []}), "tools"),
        (openai("chat/completions", GOOD), "messages"),
        (openai("chat/completions", {"messages": [{}], "logprobs": 3}), "logprobs"),
        (openai("chat/completions", {"messages": [{}], "top_logprobs": 3}), "top_logprobs"),
        (openai("chat/completions", {"messages": [{}], "max_tokens": 1, "max_completion_tokens": 1}), "max_tokens"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(line, name):
    assert name in parsed(line).error


def test_every_sampling_field_of_a_line_is_honoured():
    given = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 4,
        "n": 2,
        "ignore_eos": True,
        "logprobs": 1,
    }
    line = {**GOOD, **given, "stop": "x", "stop_token_ids": [7], "logit_bias": {"5": -1}}
    expected = SamplingParams(**given, stop=("x",), stop_token_ids=(7,), logit_bias={5: -1})
    assert parsed(line).params == expected
    assert set(line) - {"prompt"} == set(SamplingParams.__dataclass_fields__)
    assert parsed(openai("completions", line)).params == expected
    chat = {**line, "messages": [{}], "logprobs": True, "top_logprobs": 1}
    del chat["prompt"]
    assert parsed(openai("chat/completions", chat)).params == expected


def test_fields_left_out_or_null_come_from_the_defaults():
    assert parsed({**GOOD, "temperature": None, "stop": None}).params == DEFAULTS
    neutral = {"model": "demo", "stream": False, "echo": False, "suffix": None, "best_of": 1, "n": None}
    assert parsed(openai("completions", {**GOOD, **neutral})).params == DEFAULTS


def test_a_refused_line_keeps_its_id():
    assert parsed({**GOOD, "id": "mine", "nonsense": 1}).id == "mine"
    assert parsed(openai("completions", {"nonsense": 1})).id == "c"
    assert parse_line(Line(7, b"{"), DEFAULTS, bool).id == "line-7"


# ---- answering -------------------------------------------------------------------------------------------------------


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


def test_a_prompt_that_the_pool_can_never_hold_is_an_error_in_its_line(assembly):

    class Small:
        """The engine with a pool of four pages of 16 tokens."""

        limits = replace(assembly.runner.limits, pages=4)
        dispatch, fetch = assembly.runner.dispatch, assembly.runner.fetch

    llm = LLM(replace(assembly, loop=EngineLoop(Small(), queue=8, prefix_cache=True)))
    refused, answered = run_lines(llm, {"prompt": [5] * 80}, {"prompt": "bell"})
    assert "page pool" in refused["error"]["message"]
    assert answered["error"] is None


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
    (record,) = run_lines(llm, openai("completions", {**GOOD, "nonsense": 1}))
    assert record["custom_id"] == "c"
    assert "nonsense" in record["error"]["message"]
    assert record["response"]["status_code"] == 400


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
    assert len(read) <= 16 * ENGINE.slots + 1


# ---- the output file -------------------------------------------------------------------------------------------------


@pytest.fixture
def job(llm, tmp_path) -> Callable[..., tuple]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = ["bell", "By day", [], "one", "a 🙂"]
    source.write_text("\n".join(json.dumps({"prompt": p, "id": i}) for i, p in enumerate(prompts)))

    def answer(load=lambda: llm, defaults: SamplingParams = DEFAULTS, *, ref: str = "tiny", overwrite: bool = False):
        return run_file(load, ref, source, target, defaults, overwrite=overwrite, progress=False)

    answer.source, answer.target = source, target
    return answer


def not_loaded() -> LLM:
    pytest.fail("the model is loaded although nothing is left to do")


def test_a_job_cut_anywhere_goes_on_to_the_same_file(job):
    summary = job()
    assert (summary.lines, summary.failed) == (5, 1)
    whole = job.target.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in {0, 1, ends[0] - 1, *ends[:3], ends[2] + 1, ends[3] - 5, len(whole) - 1}:
        job.target.write_bytes(whole[:cut])
        assert job() == summary
        assert job.target.read_bytes() == whole


def test_a_finished_job_is_left_alone_and_says_what_it_said(job):
    summary = job()
    whole = job.target.read_bytes()
    assert job(not_loaded) == summary
    assert job.target.read_bytes() == whole


def test_zeros_that_a_power_cut_left_are_taken_off(job):
    job()
    whole = job.target.read_bytes()
    first = whole.index(b"\n") + 1
    job.target.write_bytes(whole[:first] + bytes(50) + b"\n" + whole[first:])
    job()
    assert job.target.read_bytes() == whole


@pytest.mark.parametrize("changed", ["input", "model", "parameters"])
def test_a_job_that_changed_is_refused(job, changed):
    job()
    whole = job.target.read_bytes()
    with job.source.open("a") as file:
        file.write("\n" if changed == "input" else "")
    defaults = replace(DEFAULTS, max_tokens=7 if changed == "parameters" else 6)
    with pytest.raises(RequestError, match=changed):
        job(not_loaded, defaults, ref="other" if changed == "model" else "tiny")
    assert job.target.read_bytes() == whole


def test_overwrite_begins_anew(job):
    job()
    job(defaults=replace(DEFAULTS, max_tokens=1), overwrite=True)
    assert json.loads(job.target.read_text().splitlines()[0])["usage"]["completion_tokens"] == 1


def test_a_file_that_is_not_ours_is_never_written(job):
    job.target.write_text("precious\n")
    with pytest.raises(RequestError, match="exists"):
        job(not_loaded)
    assert job.target.read_text() == "precious\n"


def test_input_and_output_may_not_be_one_file(job, llm):
    before = job.source.read_bytes()
    with pytest.raises(RequestError, match="both"):
        run_file(not_loaded, "tiny", job.source, job.source, DEFAULTS, overwrite=True, progress=False)
    assert job.source.read_bytes() == before


def test_a_missing_input_is_refused(tmp_path):
    with pytest.raises(RequestError, match="cannot be read"):
        run_file(not_loaded, "t", tmp_path / "no", tmp_path / "out", DEFAULTS, overwrite=False, progress=False)
    assert not (tmp_path / "out").exists()


def test_two_jobs_cannot_write_one_file(tmp_path):
    first = Journal.open(tmp_path / "out.jsonl", {"input": "x"})
    with pytest.raises(RequestError, match="another batch job"):
        Journal.open(tmp_path / "out.jsonl", {"input": "x"})
    first.close()
    Journal.open(tmp_path / "out.jsonl", {"input": "x"}).close()


def test_pipes_are_answered_and_never_go_over_a_file(llm, tmp_path, monkeypatch, capsysbinary):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "bell"}')))
    options = {"overwrite": False, "progress": False}
    run_pipe(lambda: llm, "tiny", Path("-"), Path("-"), DEFAULTS, **options)
    assert json.loads(capsysbinary.readouterr().out)["id"] == "line-1"
    (tmp_path / "out").write_text("precious")
    with pytest.raises(RequestError, match="exists"):
        run_pipe(not_loaded, "tiny", Path("-"), tmp_path / "out", DEFAULTS, **options)


def test_kill_9_and_again_gives_every_id_exactly_once(tiny_path, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    count = 400
    lines = [{"prompt": f"bell {i}", "id": i, "max_tokens": 30, "ignore_eos": True} for i in range(count)]
    lines[count - 1]["nonsense"] = 1
    source.write_text("\n".join(map(json.dumps, lines)))
    flags = [f"--{name}={value}" for name, value in FLAGS.items()]
    command = [sys.executable, "-m", "jaxinfer", "batch", str(source), str(target), "-m", str(tiny_path), *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: target.exists() and target.read_bytes().count(b"\n") >= 20, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    done = target.read_bytes().count(b"\n")
    assert 20 <= done < count
    with target.open("ab") as file:
        file.write(b'{"id": 9999, "te')  # as a write that the kill cut in two
    again = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert again.returncode == 3, again.stderr
    assert f"1 of {count} lines failed".encode() in again.stderr
    records = [json.loads(line) for line in target.read_bytes().splitlines()]
    assert [record["id"] for record in records] == list(range(count))
    assert [record["error"] is None for record in records] == [True] * (count - 1) + [False]
    assert all(len(record["token_ids"]) == 30 for record in records[:-1])


def wait_for(done: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not done():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
