"""`eval`: what it prints, and what it refuses with exit code 2."""

import json
from pathlib import Path

import pytest

from jaxinfer.checkpoint.load import load
from jaxinfer.perplexity import perplexity
from jaxinfer.roofline import Chip

TEXT = Path(__file__).parents[1] / "data" / "tiny" / "text.txt"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that need not be measured: bound by memory at one byte a FLOP."""
    monkeypatch.setattr("jaxinfer.bench.measure_machine", lambda dtype: Chip("this machine", 1e12, 1e9, 1e9))


def test_eval_prints_what_was_measured(code, tiny_path, capsys):
    arguments = ["eval", str(tiny_path), "--text", str(TEXT), "--context", "64", "--stride", "30", "--tokens", "100"]
    assert code(*arguments, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    expected = perplexity(
        load(str(tiny_path), dtype="float32"), TEXT.read_text(encoding="utf-8"), context=64, stride=30, tokens=100
    )
    assert said["perplexity"] == pytest.approx(expected.perplexity)
    assert said["bits_per_byte"] == pytest.approx(expected.bits_per_byte)
    assert (said["model"], said["dtype"], said["tokens"], said["bytes"]) == ("tiny", "float32", 100, expected.bytes)
    assert (said["weights"], said["kv_dtype"]) == ("float32", "float32")
    assert [window["nll"] for window in said["windows"]] == pytest.approx([w.nll for w in expected.windows])
    assert said["bound_by"] == "memory"
    assert said["rate_bound"] == pytest.approx(100 / (expected.cost.bytes / 1e9))
    assert said["roofline"] == pytest.approx(said["rate"] / said["rate_bound"])
    assert code(*arguments) == 0
    lines = capsys.readouterr().out
    assert f"tiny, float32: perplexity {expected.perplexity:.4f}, {expected.bits_per_byte:.4f} bits per byte\n" in lines
    assert f"100 tokens scored ({expected.bytes} bytes) in {len(expected.windows)} window(s) of 64, 30 apart\n" in lines


def test_eval_splits_a_model_over_devices(code, tiny_path, capsys):
    arguments = ["eval", str(tiny_path), "--text", str(TEXT), "--context", "64", "--tokens", "60", "--json"]
    found = []
    for tensor in ("1", "2"):
        assert code(*arguments, "--tensor", tensor) == 0
        found.append(json.loads(capsys.readouterr().out)["nll"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (None, [], "cannot be read"),
        (b"caf\xe9 " * 20, [], "no UTF-8 text: invalid continuation byte at byte 3"),
        (b"", [], "the text has 0 tokens; expected 2 or more"),
        (b"a b c d e f", ["--tokens", "1"], "tokens is 1"),
        (b"a b c d e f", ["--context", "100000"], "context is 100000"),
        (b"a b c d e f", ["--context", "8", "--stride", "9"], "stride is 9"),
        (b"a b c d e f", ["--tensor", "3"], "kv_heads 2"),
    ],
)
def test_eval_refuses_in_one_line_with_exit_code_2(code, tiny_path, tmp_path, content, arguments, said, capsys):
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    assert code("eval", str(tiny_path), "--text", str(text), *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_eval_without_a_text_is_bad_usage(code, capsys):
    assert code("eval", "demo") == 2
    assert "--text" in capsys.readouterr().err


def test_eval_takes_int4_weights(code, tiny_path, monkeypatch, capsys):
    """On CPU an executable that was compiled ahead of time refuses int4 arrays, so they are held in bytes there."""
    monkeypatch.setattr("jaxinfer.model.quantised.NARROW", 0)
    assert code("eval", str(tiny_path), "--text", str(TEXT), "--tokens", "40", "--quantize", "int4") == 0
    assert "int4 in groups of" in capsys.readouterr().out
