"""Leaves that stay as a GGUF file has them: the weights of the decoded ones, without any of those being made."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from jaxinfer.checkpoint import gguf as gguf_module
from jaxinfer.checkpoint.fill import flatten
from jaxinfer.checkpoint.load import load, load_structs
from jaxinfer.errors import ConfigError
from jaxinfer.model.quantised import Quantised, parts_of

from .makers import gguf_fields, gguf_tensors, hf_config, hf_weights, write_gguf, write_hf

T = GGMLQuantizationType


def write(path: Path, family: str, kinds: dict[str, GGMLQuantizationType]) -> str:
    """A file whose tensors are of the kinds that end their names; the others stay float32."""
    tensors: dict[str, Any] = gguf_tensors(family, hf_weights(family))
    for name, value in tensors.items():
        for end, kind in kinds.items():
            tensors[name] = (value, kind) if name.endswith(f"{end}.weight") else tensors[name]
    return str(write_gguf(path / "m.gguf", family, tensors, gguf_fields(family)))


def leaves(ref: str, quantize: Any = "stored") -> dict[str, Any]:
    return {
        "/".join(path): leaf for path, leaf in flatten(load(ref, dtype="float32", quantize=quantize).params).items()
    }


MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "token_embd", "output")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", [T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_1], ids=lambda kind: kind.name)
def test_stored_leaves_are_the_decoded_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: GGMLQuantizationType
):
    """llama's q and k come in another order of rows, which their scales follow."""
    ref = write(tmp_path, family, dict.fromkeys(MATRICES, kind))
    decoded = leaves(ref, None)
    monkeypatch.setattr(gguf_module.gguf, "dequantize", lambda *_: pytest.fail("a tensor is decoded"))
    stored = leaves(ref)
    small = jnp.int4 if kind in (T.Q4_0, T.Q4_1) else jnp.int8
    for name, leaf in stored.items():
        if decoded[name].ndim == 1:
            np.testing.assert_array_equal(leaf, decoded[name])
            continue
        assert isinstance(leaf, Quantised), name
        assert leaf.values.dtype == small
        weights = np.asarray(decoded[name])
        np.testing.assert_allclose(leaf.dequantise(), weights, rtol=0, atol=1e-6 * np.abs(weights).max())


MIXED = {"attn_q": T.Q4_1, "attn_k": T.Q8_0, "attn_v": T.Q5_0, "ffn_gate": T.Q4_0, "ffn_up": T.Q4_1, "ffn_down": T.Q8_0}


def test_a_leaf_of_several_types_becomes_int8_with_the_same_weights(tmp_path: Path):
    ref = write(tmp_path, "llama", MIXED)
    decoded, stored = leaves(ref, None), leaves(ref)
    qkv, gate_up, down = (stored[f"block_1/{name}"] for name in ("attention/qkv", "mlp/gate_up", "mlp/down"))
    assert (qkv.values.dtype, qkv.offset is None) == (jnp.int8, False)
    assert (gate_up.values.dtype, gate_up.offset is None) == (jnp.int4, False)
    assert (down.values.dtype, down.offset) == (jnp.int8, None)
    for name in ("attention/qkv", "mlp/gate_up", "mlp/down"):
        leaf, weights = stored[f"block_1/{name}"], np.asarray(decoded[f"block_1/{name}"])
        np.testing.assert_allclose(leaf.dequantise(), weights, rtol=0, atol=1e-6 * np.abs(weights).max())


def test_a_leaf_with_a_plain_part_is_decoded(tmp_path: Path):
    ref = write(tmp_path, "llama", {"attn_q": T.Q8_0, "ffn_down": T.Q8_0})
    decoded, stored = leaves(ref, None), leaves(ref)
    np.testing.assert_array_equal(stored["block_0/attention/qkv"], decoded["block_0/attention/qkv"])
    assert isinstance(stored["block_0/mlp/down"], Quantised)


@pytest.mark.parametrize("quantize", [None, "int8", "int4", "stored"])
def test_the_plan_knows_what_loading_makes(tmp_path: Path, quantize: Any):
    ref = write(tmp_path, "llama", {**MIXED, "attn_output": T.F16})
    planned = flatten(load_structs(ref, "bfloat16", quantize))
    loaded = flatten(load(ref, dtype="bfloat16", quantize=quantize).params)
    assert planned.keys() == loaded.keys()
    for path, leaf in loaded.items():
        expected = [(part.shape, part.dtype) for part in parts_of(planned[path])]
        assert [(part.shape, part.dtype) for part in parts_of(leaf)] == expected


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path):
    plain = write(tmp_path, "llama", {})
    with pytest.raises(ConfigError, match=r"quantize is 'stored', but m.gguf holds no quantised weights"):
        load(plain, dtype="float32", quantize="stored")
    shards = {"model.safetensors": hf_weights("llama")}
    directory = write_hf(tmp_path / "hf", hf_config("llama"), shards)
    for ask in (lambda: load(str(directory), dtype="float32", quantize="stored"), lambda: structs(directory)):
        with pytest.raises(ConfigError, match="hf is no GGUF file"):
            ask()


def structs(directory: Path) -> Any:
    return load_structs(str(directory), "float32", "stored")


def test_a_type_of_other_numbers_than_whole_ones_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ref = write(tmp_path, "llama", {"ffn_down": T.Q8_0})
    monkeypatch.delitem(gguf_module.TYPES, T.Q8_0)
    with pytest.raises(ConfigError, match=r"'blk.0.ffn_down.weight' is stored as Q8_0; what is kept as it is: Q4_0"):
        load(ref, dtype="float32", quantize="stored")
