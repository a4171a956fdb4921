"""`batch`, `convert` and `bench`: what comes out and what is refused."""

import dataclasses
import json
from pathlib import Path

from jaxinfer import CacheConfig, EngineConfig, SamplingParams
from jaxinfer.llm import LLM

ENGINE = EngineConfig(slots=4, context=96, chunk=32, cache=CacheConfig(page_size=16, pages=24))
GREEDY = ["-t", "0", "--max-tokens", "8"]


def test_batch_answers_a_file(code, model, tmp_path, capsys):
    (tmp_path / "in").write_text('{"prompt": "bell"}\n{"prompt": "bell", "x": 1}\n')
    arguments = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), *model, *GREEDY]
    assert code(*arguments) == 3
    assert "1 of 2 lines failed" in capsys.readouterr().err
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [record["error"] is None for record in records] == [True, False]
    (tmp_path / "in").write_text('{"prompt": "bell"}\n')
    assert code(*arguments) == 2
    assert code(*arguments, "--overwrite") == 0


def test_convert_makes_a_checkpoint_that_says_the_same(code, llm, tiny_path, tmp_path, capsys):
    target = tmp_path / "copy"
    assert code("convert", str(tiny_path), str(target)) == 0
    assert "read back equal" in capsys.readouterr().out
    again = LLM.load(str(target), ENGINE, progress=False)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    assert again.generate(["By day"], params)[0].token_ids == llm.generate(["By day"], params)[0].token_ids
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_convert_replaces_only_what_it_may(code, tiny_path, tmp_path, capsys):
    target = tmp_path / "copy"
    assert code("convert", str(tiny_path), str(target)) == 0
    assert code("convert", str(tiny_path), str(target)) == 2
    assert code("convert", str(tiny_path), str(target), "--force", "--dtype", "bfloat16") == 0
    assert code("convert", str(target), str(target), "--force") == 2
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    assert code("convert", str(tiny_path), str(precious), "--force") == 2
    assert (precious / "file").read_text() == "mine"
    assert "--force does not replace it" in capsys.readouterr().err


def test_a_checkpoint_is_replaced_whole_or_not_at_all(code, tiny_path, tmp_path, monkeypatch, capsys):
    target = tmp_path / "copy"
    assert code("convert", str(tiny_path), str(target)) == 0
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    rename = Path.rename

    def fails(self, to):
        if self.name.endswith(".unverified"):
            raise OSError("the disk is full")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fails)
    assert code("convert", str(tiny_path), str(target), "--force") == 1
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_what_a_killed_run_left_is_cleared_away(code, tiny_path, tmp_path):
    left = [".copy.unverified", ".copy.unverified.partial", ".copy.replaced"]
    for name in left:
        (tmp_path / name / "params").mkdir(parents=True)
    assert code("convert", str(tiny_path), str(tmp_path / "copy")) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_convert_into_the_folder_we_are_in(code, tiny_path, tmp_path, monkeypatch):
    target = tmp_path / "copy"
    assert code("convert", str(tiny_path), str(target)) == 0
    monkeypatch.chdir(target)
    assert code("convert", str(tiny_path), ".", "--force") == 0
    assert code("convert", str(target), str(tmp_path / "again")) == 0


def test_a_copy_that_differs_is_found_out(code, tiny_path, tmp_path, monkeypatch, capsys):
    from jaxinfer.checkpoint import load as loading

    save = loading.save_orbax

    def damaged(checkpoint, directory: Path) -> None:
        params = {**checkpoint.params, "final_norm": checkpoint.params["final_norm"] + 1}
        save(dataclasses.replace(checkpoint, params=params), directory)

    monkeypatch.setattr(loading, "save_orbax", damaged)
    assert code("convert", str(tiny_path), str(tmp_path / "copy")) == 2
    assert "final_norm" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_bench_measures_each_number_of_streams(code, llm, model, monkeypatch, capsys):
    monkeypatch.setattr("jaxinfer.bench.READ_BYTES", 2**20)
    monkeypatch.setattr("jaxinfer.bench.ENOUGH", 0.0)
    monkeypatch.setattr(LLM, "load", lambda ref, engine: llm)
    _, ref, *_ = model
    sizes = ["--streams", "1", "--streams", "3", "--prompt", "40", "--output", "5"]
    assert code("bench", ref, *sizes, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["streams"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert 0 < row["ttft_p50"] <= row["ttft_p99"]
        assert 0 < row["itl_p50"] <= row["itl_p99"]
        assert row["decode_bound"] > 0
        assert row["decode_limit"] in ("compute", "memory")
    assert code("bench", ref, *sizes) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in table if line.startswith("|")] == ["streams", "--:", "1", "3"]
    assert code("bench", ref, "--streams", "5") == 2
    assert code("bench", ref, "--streams", "1", "--prompt", "95") == 2
