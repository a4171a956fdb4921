"""The output file, whatever happens to the job: each line exactly once, and nobody else's file touched."""

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.batch.job import run_file, run_pipe
from jaxinfer.batch.journal import Journal
from jaxinfer.errors import CheckpointError, RequestError

FLAGS = {"slots": 4, "context": 96, "chunk": 32, "page-size": 16, "pages": 24, "temperature": 0}
"""The same on the command line: the executables then come from the cache."""
DEFAULTS = SamplingParams(max_tokens=6, temperature=0.0)


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


def unknown_model() -> LLM:
    raise CheckpointError("no model is called typo")


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


def test_a_job_that_has_written_nothing_may_still_change(job):
    with pytest.raises(CheckpointError):
        job(unknown_model, ref="typo")
    assert job().lines == 5


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


@pytest.mark.parametrize("answer", [run_file, run_pipe])
def test_the_input_may_not_be_what_remembers_the_job(job, tmp_path, answer):
    source = tmp_path / "answers.job"
    source.write_bytes(before := job.source.read_bytes())
    with pytest.raises(RequestError, match="both"):
        answer(not_loaded, "tiny", source, tmp_path / "answers", DEFAULTS, overwrite=True, progress=False)
    assert source.read_bytes() == before


def test_a_pipe_never_goes_over_its_own_input(tiny_path, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "bell"}\n')
    command = [sys.executable, "-m", "jaxinfer", "batch", "-", str(source), "--overwrite", "-m", str(tiny_path)]
    with source.open("rb") as stdin:
        ended = subprocess.run(command, stdin=stdin, capture_output=True, timeout=300, check=False)
    assert ended.returncode == 2
    assert b"both" in ended.stderr
    assert source.read_text() == '{"prompt": "bell"}\n'


@pytest.mark.parametrize("device", ["/dev/full", "/dev/null"])
def test_an_output_that_is_no_file_is_refused(job, device):
    with pytest.raises(RequestError, match="no regular file"):
        run_file(not_loaded, "tiny", job.source, Path(device), DEFAULTS, overwrite=False, progress=False)
    assert not Path(f"{device}.job").exists()


@pytest.mark.parametrize("memory", [b"[]", b"3", b"null", b"{", b"\xff", b"[" * 100_000], ids=range(6))
def test_a_damaged_memory_of_the_job_is_refused(job, memory):
    job()
    job.target.with_name(job.target.name + ".job").write_bytes(memory)
    with pytest.raises(RequestError, match="damaged"):
        job(not_loaded)


def test_what_a_pipe_wrote_is_never_gone_on_from(job, llm, monkeypatch):
    job()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "bell"}\n' * 5)))
    run_pipe(lambda: llm, "tiny", Path("-"), job.target, DEFAULTS, overwrite=True, progress=False)
    with pytest.raises(RequestError, match="exists"):
        job(not_loaded)


@pytest.mark.parametrize("name", ["stdin", "stdout"])
def test_a_closed_standard_stream_is_refused(monkeypatch, name):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setattr(sys, name, None)
    with pytest.raises(RequestError, match="closed"):
        run_pipe(not_loaded, "tiny", Path("-"), Path("-"), DEFAULTS, overwrite=False, progress=False)


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
    with pytest.raises(CheckpointError):
        run_pipe(unknown_model, "typo", Path("-"), tmp_path / "out", DEFAULTS, **options)
    assert not (tmp_path / "out").exists()
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
