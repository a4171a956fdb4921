"""A checkpoint that does not fit is refused by the name of what does not fit; what is tied is read as it is meant."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoint.load import load
from jaxinfer.errors import CheckpointError, ConfigError, JaxInferError

from .makers import gguf_model, gguf_tensors, hf_model, hf_weights

Weights = dict[str, np.ndarray]


def drop(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {n: v for n, v in weights.items() if n != name}


def change(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Callable[[Weights], Weights]:
    return lambda weights: {**weights, name: np.ascontiguousarray(value(weights[name]))}


UP, DOWN, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop(UP), rf"{UP} is missing; expected shape \(32, 32\)"),
        (drop(NORM), rf"{NORM} is missing"),
        (drop("model.embed_tokens.weight"), r"embed_tokens\.weight is missing"),
        (drop("lm_head.weight"), r"lm_head\.weight is missing"),
        (change(DOWN, np.transpose), rf"{DOWN} has shape \(64, 32\); expected \(32, 64\)"),
        (change(DOWN, lambda w: w[None]), rf"{DOWN} has shape \(1, 32, 64\)"),
        (change(NORM, lambda w: w[:-1]), rf"{NORM} has shape \(31,\); expected \(32,\)"),
        (lambda w: {**w, "model.layers.2.mlp.up_proj.weight": w[UP]}, r"layers\.2.*is surplus"),
        (lambda w: {**w, "model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}, r"q_proj\.bias .*surplus"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, edit: Callable[[Weights], Weights], message: str):
    with pytest.raises(CheckpointError, match=message):
        load(hf_model(tmp_path, "llama", edit(hf_weights("llama"))), dtype="float32")


def test_a_gguf_tensor_that_does_not_fit_is_named(tmp_path: Path):
    tensors = gguf_tensors("llama", hf_weights("llama"))
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight is missing"):
        load(gguf_model(tmp_path, "llama", drop("blk.1.ffn_up.weight")(tensors)), dtype="float32")
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.scale of shape \(64,\) is surplus"):
        load(gguf_model(tmp_path, "llama", {**tensors, "blk.0.attn_q.scale": np.ones(64, np.float32)}), dtype="float32")


def test_a_stretched_rope_in_a_gguf_tensor(tmp_path: Path):
    tensors = gguf_tensors("llama", hf_weights("llama"))
    unstretched = {**tensors, "rope_freqs.weight": np.ones(8, np.float32)}
    assert load(gguf_model(tmp_path, "llama", unstretched), dtype="float32").config.rope.factor == 1.0
    other = {**tensors, "rope_freqs.weight": np.full(8, 4, np.float32)}
    assert load(gguf_model(tmp_path, "llama", other), dtype="float32").config.rope.long_factors == (4.0,) * 8
    other = {**tensors, "rope_freqs.weight": np.zeros(8, np.float32)}
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        load(gguf_model(tmp_path, "llama", other), dtype="float32")


def test_a_hostile_layer_count_is_refused_before_anything_is_built(tmp_path: Path):
    with pytest.raises(CheckpointError, match="4096 layers"):
        load(hf_model(tmp_path, num_hidden_layers=4096), dtype="float32")


def test_a_hostile_head_size_is_refused_before_its_frequencies_are_made(tmp_path: Path):
    with pytest.raises(ConfigError, match="head_dim is 2147483646"):
        load(hf_model(tmp_path, head_dim=2**31 - 2), dtype="float32")


def test_a_damaged_config(tmp_path: Path):
    path = Path(hf_model(tmp_path)) / "config.json"
    for text, message in (("{", "no JSON"), ("[]", "holds a list"), ("[" * 100_000, "no JSON"), ("\xff", "UTF-8")):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(CheckpointError, match=message):
            load(str(path.parent), dtype="float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"rope_scaling": {"rope_type": "unheard", "factor": 2.0}}, "rope is .*unheard"),
        ({"rope_scaling": {"type": "unheard", "factor": 2.0}}, "rope is .*unheard"),
        ({"architectures": ["UnheardForCausalLM"]}, "architecture is .*Unheard"),
        ({"hidden_act": "relu"}, "hidden_act"),
    ],
)
def test_a_config_that_nobody_implemented(tmp_path: Path, change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        load(hf_model(tmp_path, **change), dtype="float32")


@settings(max_examples=20)
@given(data=st.data())
def test_any_bytes_of_a_model_overwritten(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    """The whole way: damage in metadata or tokenizer ends in one of our errors, or in a model."""
    path = tmp_path_factory.getbasetemp() / "whole.gguf"
    if not (path.parent / "m.gguf").exists():
        gguf_model(path.parent)
    raw = (path.parent / "m.gguf").read_bytes()
    at = data.draw(st.integers(0, 9_000))
    patch = data.draw(st.binary(min_size=1, max_size=8))
    path.write_bytes(raw[:at] + patch + raw[at + len(patch) :])
    with contextlib.suppress(JaxInferError):
        load(str(path), dtype="float32")


# ---- the head --------------------------------------------------------------------------------------------------------


def test_a_tied_head_is_no_leaf(tmp_path: Path):
    weights = drop("lm_head.weight")(hf_weights("llama"))
    checkpoint = load(hf_model(tmp_path, "llama", weights, tie_word_embeddings=True), dtype="float32")
    assert checkpoint.config.tied_head
    assert "head" not in checkpoint.params


def test_a_gguf_file_without_a_head_is_tied(tmp_path: Path):
    tensors = gguf_tensors("llama", hf_weights("llama"))
    tied = load(gguf_model(tmp_path, weights=drop("output.weight")(tensors)), dtype="float32")
    assert tied.config.tied_head
    assert "head" not in tied.params
    untied = load(gguf_model(tmp_path, weights=tensors), dtype="float32")
    np.testing.assert_array_equal(untied.params["head"], tensors["output.weight"])


def test_a_head_equal_to_the_embedding_it_is_tied_to_is_left_unread(tmp_path: Path):
    weights = hf_weights("llama")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    checkpoint = load(hf_model(tmp_path, "llama", weights, tie_word_embeddings=True), dtype="float32")
    assert checkpoint.config.tied_head
    assert "head" not in checkpoint.params


def test_a_head_unlike_the_embedding_it_is_tied_to_is_the_head(tmp_path: Path):
    weights = hf_weights("llama")
    checkpoint = load(hf_model(tmp_path, "llama", weights, tie_word_embeddings=True), dtype="float32")
    assert not checkpoint.config.tied_head
    np.testing.assert_array_equal(checkpoint.params["head"], weights["lm_head.weight"])
