"""Perplexity against transformers' (scripts/make_perplexity_golden.py), and what must hold of any windows."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import perplexity as module
from jaxinfer.checkpoint.load import Checkpoint, load
from jaxinfer.config import MeshConfig, ModelConfig
from jaxinfer.engine.ops import PagedOps
from jaxinfer.engine.sharding import make_mesh, pages_sharding, param_shardings
from jaxinfer.errors import CheckpointError, ConfigError, RequestError
from jaxinfer.model.ops import TokenBatch
from jaxinfer.model.quantised import spread_all
from jaxinfer.model.transformer import Transformer, abstract_params
from jaxinfer.perplexity import PAGE, Window, perplexity, scoring_step, slice_rows, slide

TESTS = Path(__file__).parent
TEXT = (TESTS / "data" / "eval" / "alice.txt").read_text(encoding="utf-8")
GOLDEN: dict[str, Any] = json.loads((TESTS / "golden" / "perplexity.json").read_text(encoding="utf-8"))
TINY_TEXT = (TESTS / "data" / "tiny" / "text.txt").read_text(encoding="utf-8")
SAME = {"rel": 1e-5}


@pytest.mark.parametrize(("name", "path"), [("smollm2", "demo_path"), ("gemma3_270m", "gemma_path")])
def test_perplexity_equals_that_of_transformers(name: str, path: str, request: pytest.FixtureRequest):
    golden = GOLDEN["models"][name]
    checkpoint = load(str(request.getfixturevalue(path)), dtype="float32")
    tokenizer = checkpoint.tokenizer
    assert tokenizer.encode(TEXT, bos=False)[: len(golden["ids"])] == golden["ids"]
    assert ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) == golden["opening"]
    found = perplexity(checkpoint, TEXT, context=GOLDEN["context"], stride=GOLDEN["stride"], tokens=len(golden["ids"]))
    assert [(w.begin, w.end, w.scored) for w in found.windows] == [
        (w["begin"], w["end"], w["scored"]) for w in golden["windows"]
    ]
    losses = [window.nll / window.scored for window in found.windows]
    assert losses == pytest.approx([window["loss"] for window in golden["windows"]], rel=1e-3)
    nll = sum(window["loss"] * window["scored"] for window in golden["windows"])
    assert found.perplexity == pytest.approx(math.exp(nll / found.tokens), rel=1e-3)


def test_the_golden_has_a_model_with_a_bos_and_one_without():
    assert sorted(len(model["opening"]) for model in GOLDEN["models"].values()) == [0, 1]
    assert all(len(model["windows"]) > 2 for model in GOLDEN["models"].values())


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> Checkpoint:
    return load(str(tiny_path), dtype="float32")


@partial(jax.jit, static_argnames="config")
def all_logits(params: Any, batch: TokenBatch, config: ModelConfig) -> jax.Array:
    model, page = Transformer(config, jnp.float32), jnp.zeros((1, 2, config.kv_heads, PAGE, config.head_dim))
    hidden: Any = model.apply({"params": params}, batch, (page,) * config.layers, PagedOps())
    return model.apply({"params": params}, hidden[0][0], PagedOps(), method="logits")


def by_hand(checkpoint: Checkpoint, ids: list[int], first: int) -> float:
    """The loss of `ids` from `first` on, out of one pass with all logits at once."""
    places = np.arange(PAGE, dtype=np.int32)[None]
    row = np.pad(np.array([ids], np.int32), ((0, 0), (0, PAGE - len(ids))))
    positions, lengths = np.where(places < len(ids), places, -1), np.array([len(ids)], np.int32)
    logits = all_logits(
        checkpoint.params, TokenBatch(row, positions, np.zeros((1, 1), np.int32), lengths), checkpoint.config
    )
    logits = np.asarray(logits, np.float64)[: len(ids)]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -sum(float(logp[place - 1, ids[place]]) for place in range(first, len(ids)))


@pytest.mark.parametrize("stride", [None, 7, 39])
def test_each_token_is_scored_once_with_its_own_window_before_it(tiny: Checkpoint, stride: int | None):
    found = perplexity(tiny, TINY_TEXT, context=40, stride=stride, tokens=100)
    ids, bos = tiny.tokenizer.encode(TINY_TEXT, bos=False)[:100], tiny.tokenizer.bos_id
    assert bos is not None
    assert [t for w in found.windows for t in range(w.first, w.end)] == list(range(100))
    assert found.tokens == 100
    for window in found.windows:
        expected = by_hand(tiny, [bos, *ids[window.begin : window.end]], window.first - window.begin + 1)
        assert window.nll == pytest.approx(expected, **SAME)


def test_chunks_and_slices_change_nothing(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    whole = perplexity(tiny, TINY_TEXT, context=128, stride=100, tokens=300)
    monkeypatch.setattr(module, "CHUNK", 64)
    monkeypatch.setattr(module, "LOGIT_BYTES", 4 * 4 * tiny.config.vocab_size)
    assert slice_rows(64, tiny.config.vocab_size) == 4
    parts = perplexity(tiny, TINY_TEXT, context=128, stride=100, tokens=300)
    assert [w.nll for w in parts.windows] == pytest.approx([w.nll for w in whole.windows], **SAME)


def test_a_model_over_two_devices_scores_the_same(tiny: Checkpoint, tiny_path: Path):
    mesh = make_mesh(MeshConfig(tensor=2))
    split = load(str(tiny_path), dtype="float32", shardings=lambda config: param_shardings(config, mesh))
    found = perplexity(split, TINY_TEXT, context=64, tokens=60, mesh=mesh)
    assert found.nll == pytest.approx(perplexity(tiny, TINY_TEXT, context=64, tokens=60).nll, **SAME)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_step_lowers_for_four_tpus(quantize: Any, monkeypatch: pytest.MonkeyPatch):
    """A kernel's call that each device does not make on its own heads is refused, as no compiler can split it."""
    monkeypatch.setattr("jaxinfer.engine.ops.platform_of", lambda mesh: "tpu")
    config = ModelConfig("llama", 512, 512, 1, 8, 4, 128, 512, 256, query_scale=128**-0.5)
    mesh, dtype = make_mesh(MeshConfig(tensor=4)), "bfloat16"

    def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = abstract_params(config, dtype, quantize)
    params = jax.tree.map(placed, params, spread_all(params, param_shardings(config, mesh)))
    page = jax.ShapeDtypeStruct((2, 2, 4, PAGE, 128), dtype, sharding=pages_sharding(config, mesh))
    numbers: Any = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 64), (1, 64), (1, 2), (1,), (64,))]
    traced = scoring_step(config, dtype, dtype, mesh).trace(params, (page,), TokenBatch(*numbers[:4]), numbers[4])
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert re.findall(r'kernel_name = "(\w+)"', text) == ["kv_write", "paged_prefill_attention"]


def test_an_int8_cache_costs_a_little(tiny: Checkpoint):
    plain, held = (perplexity(tiny, TINY_TEXT, kv_dtype=kind, context=64) for kind in (None, "int8"))
    assert plain.perplexity != held.perplexity
    assert held.perplexity == pytest.approx(plain.perplexity, rel=0.01)
    assert held.cost.bytes < plain.cost.bytes


def test_bits_per_byte_are_the_loss_over_the_text_s_own_bytes(tiny: Checkpoint):
    found = perplexity(tiny, TINY_TEXT, context=64)
    assert found.bytes == pytest.approx(len(TINY_TEXT.encode()), abs=1)  # SentencePiece's space in front
    assert found.bits_per_byte == pytest.approx(found.nll / math.log(2) / found.bytes)


def test_a_text_that_the_model_recites_has_a_perplexity_near_one(tiny: Checkpoint):
    assert 1 < perplexity(tiny, TINY_TEXT, context=128, tokens=127).perplexity < 1.2


def test_progress_ends_at_the_number_of_tokens(tiny: Checkpoint):
    seen: list[tuple[str, int, int]] = []
    perplexity(tiny, TINY_TEXT, context=64, tokens=100, report=lambda *said: seen.append(said))
    assert seen[:2] == [("compile", 0, 1), ("compile", 1, 1)]
    assert seen[-1] == ("evaluate", 100, 100)


@pytest.mark.parametrize("unscored", [0, 1])
@pytest.mark.parametrize(
    ("tokens", "size", "stride"), [(2, 5, 5), (5, 5, 1), (6, 5, 5), (23, 7, 3), (23, 7, 7), (9, 2, 1)]
)
def test_windows_leave_nothing_out_and_score_nothing_twice(tokens: int, size: int, stride: int, unscored: int):
    windows = list(slide(tokens, size, stride, unscored=unscored))
    scored = [token for window in windows for token in range(window.first, window.end)]
    assert len(scored) == len(set(scored))
    heads = {window.begin for window in windows} if stride == size else {0}
    assert set(range(tokens)) - set(scored) == (heads if unscored else set())
    assert all(window.end - window.begin <= size for window in windows)
    assert windows[-1].end == tokens
    assert all(window.scored > 0 for window in windows[:-1])


def test_slices_of_logits_are_bounded_and_divide_the_chunk():
    assert slice_rows(512, 262_144) == 64
    assert slice_rows(512, 49_152) == 256
    assert slice_rows(192, 1_000) == 64
    assert slice_rows(512, 2**31) == 1


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"text": ""}, RequestError, "0 tokens"),
        ({"text": "x" * 50, "tokens": 1}, RequestError, "tokens is 1"),
        ({"text": "x" * 50, "tokens": -3}, RequestError, "tokens is -3"),
        ({"context": 1}, ConfigError, "context is 1"),
        ({"context": 10**6}, ConfigError, "context is 1000000"),
        ({"context": 16, "stride": 16}, ConfigError, "expected 1 to 15"),
        ({"stride": 0}, ConfigError, "stride is 0"),
    ],
)
def test_what_cannot_be_scored_is_refused(tiny: Checkpoint, changes: dict[str, Any], error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        perplexity(tiny, **{"text": TINY_TEXT, **changes})


def test_a_broken_model_is_no_perplexity(tiny: Checkpoint):
    broken = {**tiny.params, "final_norm": tiny.params["final_norm"].at[0].set(jnp.nan)}
    with pytest.raises(CheckpointError, match="token 0 is not finite; jaxinfer doctor"):
        perplexity(replace(tiny, params=broken), TINY_TEXT, context=64, tokens=60)


def test_a_hopeless_model_has_an_infinite_perplexity_and_no_overflow(tiny: Checkpoint):
    found = perplexity(tiny, TINY_TEXT, context=64, tokens=60)
    worst = replace(found, windows=(Window(0, 0, 1, nll=1e4),))
    assert worst.perplexity == math.inf
    assert np.isfinite(worst.bits_per_byte)
