"""`plan`: what fits and how fast, before a weight is read."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxinfer import CacheConfig, EngineConfig
from jaxinfer.checkpoint.load import load_config, load_structs
from jaxinfer.cli.plan import plan_chip, weight_bytes
from jaxinfer.roofline import CHIPS, Chip, kv_bytes_per_token, total_weights

TESTS = Path(__file__).parents[1]
ENGINE = EngineConfig(slots=4, context=96, chunk=32, cache=CacheConfig(page_size=16, pages=24))


def test_plan_says_what_fits_and_how_fast_without_loading(code, tiny_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxinfer.checkpoint.load.load", lambda *_, **__: pytest.fail("a weight is read"))
    arguments = ["plan", str(tiny_path), "--page-size", "16", "--chunk", "32"]
    assert code(*arguments, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["chip"] for row in rows} == set(CHIPS)
    config = load_config(str(tiny_path))
    norms = (2 * config.layers + 1) * config.width * 4
    assert {row["weight_bytes"] for row in rows} == {2 * total_weights(config) + norms}
    sizes = {row["chip"]: row["page_bytes"] for row in rows}
    assert sizes["H100"] == 16 * kv_bytes_per_token(config, 2)
    # A TPU keeps whole rows of 128 lanes, and a key and its value share one here.
    assert sizes["TPU v6e"] == 16 * config.layers * config.kv_heads * 128 * 2 > sizes["H100"]
    assert code(*arguments) == 0
    assert f"{sizes['H100'] / 2**20:.2f} to {sizes['TPU v6e'] / 2**20:.2f} MiB a page" in capsys.readouterr().out
    assert code(*arguments, "--chip", "H100", "--chip", "v6e") == 0
    out = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")][2:] == ["H100", "TPU v6e"]
    assert code(*arguments, "--chip", "abacus") == 2
    assert code(*arguments, "--chip", "4") == 2  # TPU v4 and L4
    assert code(*arguments, "--chip", "L4", "--kernel", "kv_write=tpu") == 0
    assert code(*arguments, "--chip", "L4", "--kernel", "kv_write=bogus") == 2


def test_plan_counts_the_weights_and_those_that_a_token_passes(code, tiny_path, capsys):
    assert code("plan", str(tiny_path), "--chip", "L4") == 0
    assert f"; {total_weights(load_config(str(tiny_path))):,} weights\n" in capsys.readouterr().out
    assert code("plan", str(TESTS / "golden" / "tiny_mixtral"), "--chip", "L4") == 0
    head, attention, expert = 264 * 32, 32 * 12 * (2 * 4 + 2 * 2), 3 * 32 * 24
    all_of_them, chosen = (2 * (attention + 32 * 4 + n * expert) for n in (4, 2))
    assert (
        f"; {all_of_them + 2 * head:,} weights, {chosen + head:,} of them for each token\n" in capsys.readouterr().out
    )


def test_plan_counts_the_executables_that_warm_up_makes(code, llm, tiny_path, flags, capsys):
    assert code("plan", str(tiny_path), *flags) == 0
    assert f"\n{len(llm.assembly.runner._steps)} executables: " in capsys.readouterr().out


def test_plan_splits_over_devices_and_says_what_does_not_fit(tiny_path):
    config = load_config(str(tiny_path))
    params = load_structs(str(tiny_path), "float32", None)
    alone, both = (weight_bytes(config, params, devices) for devices in (1, 2))
    assert alone / 2 < both < alone  # all but the norms is split
    tight = Chip("tight", 1e12, 1e9, memory=alone + 100)
    engine = dataclasses.replace(ENGINE, dtype="float32")
    assert plan_chip(config, engine, alone, tight).pages is None
    assert plan_chip(config, engine, alone, CHIPS["L4"]).pages == ENGINE.cache.pages


def test_plan_refuses_what_the_engine_would_refuse(code, tiny_path, capsys):
    assert code("plan", str(tiny_path), "--tensor", "4") == 2
    assert "kv_heads 2" in capsys.readouterr().err


def test_plan_counts_pages_of_int8_with_their_scales(code, tiny_path, capsys):
    arguments = ["plan", str(tiny_path), "--page-size", "16", "--chunk", "32", "--chip", "L4", "--json"]
    assert code(*arguments) == 0
    (plain,) = json.loads(capsys.readouterr().out)
    assert code(*arguments, "--kv-dtype", "int8") == 0
    (int8,) = json.loads(capsys.readouterr().out)
    assert int8["page_bytes"] == 16 * kv_bytes_per_token(load_config(str(tiny_path)), 1) < plain["page_bytes"]
    assert int8["decode_full_ms"] < plain["decode_full_ms"]
    assert int8["weight_bytes"] == plain["weight_bytes"]
    assert code(*arguments[:-1], "--kv-dtype", "int8") == 0
    assert "MiB a page of 16 tokens in int8 on each" in capsys.readouterr().out
