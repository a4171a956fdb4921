"""`doctor`: the report, and exit codes 0 for healthy, 1 for a fault, 2 for what cannot be examined."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.roofline import Chip

TINY = Path(__file__).parents[1] / "golden" / "tiny_llama"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxinfer.doctor.diagnose.measure_machine", lambda dtype: Chip("this machine", 1e15, 1e9, 1e9))


def test_doctor_finds_a_sound_model_healthy(code, capsys):
    assert code("doctor", str(TINY), "--prompt", "abc") == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["vocab_size", "264"] in lines
    assert ["prompt", "'abc'"] in lines
    assert "use_cache" in out
    assert "29 tensors" in out
    assert out.endswith("healthy\n")
    assert code("doctor", str(TINY), "--prompt", "abc", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["faults"] == []
    assert said["config"]["heads"] == 4
    assert "use_cache" in said["ignored"]
    assert {tensor["name"] for tensor in said["tensors"]} == set(load_file(TINY / "model.safetensors"))


def test_doctor_names_what_is_wrong_with_exit_code_1(code, tmp_path, capsys):
    shutil.copytree(TINY, tmp_path / "model")
    weights = load_file(TINY / "model.safetensors")
    weights["model.norm.weight"][3] = np.nan
    save_file(weights, tmp_path / "model" / "model.safetensors")
    assert code("doctor", str(tmp_path / "model"), "--prompt", "abc") == 1
    out = capsys.readouterr().out
    assert "2 fault(s)\n" in out
    assert "  tensor model.norm.weight: 1 of 32 numbers are NaN or infinite\n" in out
    assert "  run: final norm is not finite\n" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/no/such/model"], "is not found"),
        ([str(TINY), "--reference", "/no/such/model"], "holds no config.json"),
        ([str(TINY), "--prompt", "x" * 200], "the prompt has 201 tokens"),
        ([str(TINY), "--tolerance", "0"], "tolerance is 0"),
    ],
)
def test_what_cannot_be_examined_is_one_line_and_exit_code_2(code, arguments, said, capsys):
    assert code("doctor", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1
