"""`generate`: what is printed where; and the same through `serve`."""

import io
import json
import signal
import subprocess
import sys
from itertools import takewhile

import pytest

from jaxinfer import SamplingParams
from pallas_kernels.dispatch import OPERATIONS

GREEDY = ["-t", "0", "--max-tokens", "8"]


def test_generate_prints_the_text_and_its_timing_apart(code, llm, model, capsys):
    assert code("generate", "By day", *model, *GREEDY) == 0
    captured = capsys.readouterr()
    output = llm.generate(["By day"], SamplingParams(max_tokens=8, temperature=0.0))[0]
    assert captured.out == output.text + "\n"
    prompt, made = len(output.prompt_token_ids), len(output.token_ids)
    assert captured.err.startswith(f"{prompt} + {made} tokens")
    assert all(word in captured.err for word in ("TTFT", "TPOT", "tok/s", output.finish.value))


@pytest.mark.parametrize("argument", [[], ["-"]])
def test_generate_reads_standard_input(code, model, argument, capsys, monkeypatch):
    assert code("generate", "By day", *model, *GREEDY) == 0
    given = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("By day"))
    assert code("generate", *argument, *model, *GREEDY) == 0
    assert capsys.readouterr().out == given


def test_generate_prints_one_json_object(code, llm, model, capsys):
    assert code("generate", "By day", *model, *GREEDY, "--json", "--logprobs", "1") == 0
    record = json.loads(capsys.readouterr().out)
    output = llm.generate(["By day"], SamplingParams(max_tokens=8, temperature=0.0, logprobs=1))[0]
    assert (record["text"], record["token_ids"]) == (output.text, list(output.token_ids))
    assert record["finish_reason"] == output.finish.value
    assert len(record["logprobs"]) == len(output.token_ids)


def test_generate_prints_every_choice(code, llm, model, capsys):
    assert code("generate", "bell", *model, "-t", "9", "--seed", "1", "--max-tokens", "8", "--n", "2") == 0
    out = capsys.readouterr().out
    output = llm.generate(["bell"], SamplingParams(max_tokens=8, temperature=9.0, seed=1, n=2))[0]
    for index, choice in enumerate(output.choices):
        assert f"--- {index + 1} of 2 ({choice.finish.value})\n{choice.text}\n" in out


def test_chat_without_a_template_is_refused(code, model, capsys):
    assert code("generate", "hello", *model, "--chat") == 2
    assert "no chat template" in capsys.readouterr().err


def test_serve_answers_generate_and_chat_until_it_is_told_to_stop(code, llm, tiny_path, flags, capsys):
    command = [sys.executable, "-m", "jaxinfer", "serve", str(tiny_path), "--port", "0", "--grace", "5", *flags]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        target = server.stdout.readline().removeprefix("listening on ").strip()
        kernels = list(takewhile(lambda line: not line.startswith("ready: "), server.stdout))
        assert {line.split(":")[0] for line in kernels} == {f"kernel {operation}" for operation in OPERATIONS}
        assert code("generate", "By day", "--server", target, *GREEDY) == 0
        captured = capsys.readouterr()
        assert captured.out == llm.generate(["By day"], SamplingParams(max_tokens=8, temperature=0.0))[0].text + "\n"
        assert "tok/s" in captured.err
        assert code("generate", "By day", "--server", target, *GREEDY, "--json", "--n", "2") == 0
        assert len(json.loads(capsys.readouterr().out)["choices"]) == 2
        assert code("generate", "x" * 500, "--server", target) == 2
        assert "context of 96 tokens" in capsys.readouterr().err
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
        assert code("generate", "By day", "--server", target) == 1
    finally:
        server.kill()
        server.communicate()
