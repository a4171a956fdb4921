"""The demo from end to end with the tiny model: server up, answer streamed, timing line, server gone."""

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def demo(script):
    return script("demo")


def test_the_demo_streams_the_recital_and_a_timing_line(demo, tiny_path: Path, capsys: pytest.CaptureFixture[str]):
    text = (tiny_path.parent / "text.txt").read_text().strip()
    prompt = text[: text.index("\n\nEvery")]
    demo.main(str(tiny_path), prompt=prompt, max_tokens=200)
    out = capsys.readouterr().out
    assert text[: text.index(" at a time")] in out
    last = out.strip().splitlines()[-1]
    assert "+ 200 tokens" in last
    assert all(part in last for part in ("TTFT", "TPOT", "tok/s", "length"))


def test_the_server_is_gone_afterwards(demo, tiny_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Even where the client fails, the process that the demo started has ended when the demo has."""
    started = []

    class Watched(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(demo.subprocess, "Popen", Watched)
    with pytest.raises(ZeroDivisionError), demo.serving(str(tiny_path)):
        raise ZeroDivisionError
    (server,) = started
    assert server.returncode == 0
    assert server.stdout.closed


def test_a_model_that_is_not_there_ends_the_demo(demo):
    with pytest.raises(SystemExit, match="before it was ready"):
        demo.main("no-such-model")
