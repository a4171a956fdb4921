"""quantization_config: what is read of it, what is refused by name, and a quantised model through the whole loader."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.checkpoint.load import load
from jaxinfer.checkpoint.quantization import decoded
from jaxinfer.checkpoint.safetensors import SafetensorsDirectory
from jaxinfer.errors import CheckpointError, ConfigError

from .makers import hf_config, hf_weights, write_hf

E4M3 = ml_dtypes.float8_e4m3fn
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 16]}


def compressed(strategy: str = "tensor", **weights: Any) -> dict[str, Any]:
    group = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group, "input_activations": None}},
        "ignore": ["lm_head"],
    }


CASES = {
    "fine-grained": (FP8, "_scale_inv", "block"),
    "one scale": ({**FP8, "weight_block_size": None}, "_scale_inv", "tensor"),
    "AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale", "tensor"),
    "compressed": (compressed(), "_scale", "tensor"),
    "compressed by row": (compressed("channel"), "_scale", "channel"),
    "compressed by block": (compressed("block", block_structure=[16, 16]), "_scale", "block"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", "tensor"),
}


def quantise(weights: dict[str, np.ndarray], suffix: str, strategy: str) -> tuple[dict[str, np.ndarray], ...]:
    """The linear layers of blocks in float8 with scales, and what they stand for."""
    rng, stored, meant = np.random.default_rng(1), {}, {}
    for name, value in weights.items():
        stored[name] = meant[name] = value
        if "_proj" not in name:
            continue
        rows, columns = value.shape
        shape = {"tensor": (1, 1), "channel": (rows, 1), "block": (-(-rows // 16), -(-columns // 16))}[strategy]
        scale = rng.uniform(0.5, 2, shape).astype(np.float32)
        stored[name] = value.astype(E4M3)
        stored[name + suffix] = scale.reshape(()) if strategy == "tensor" else scale
        whole = scale.repeat(16, 0).repeat(16, 1)[:rows, :columns] if strategy == "block" else scale
        meant[name] = stored[name].astype(np.float32) * whole
    return stored, meant


@pytest.mark.parametrize("case", CASES)
def test_a_float8_model_loads_as_the_weights_it_stands_for(tmp_path: Path, case: str):
    config, suffix, strategy = CASES[case]
    stored, meant = quantise(hf_weights("llama"), suffix, strategy)
    stored["model.layers.0.mlp.up_proj.input_scale"] = np.ones((), np.float32)
    shards = {f"model-{i}.safetensors": dict(list(stored.items())[i::2]) for i in range(2)}  # scales apart from weights
    write_hf(tmp_path / "fp8", hf_config("llama", quantization_config=config), shards)
    write_hf(tmp_path / "plain", hf_config("llama"), {"model.safetensors": meant})
    for dtype in ("float32", "bfloat16"):
        found, expected = load(str(tmp_path / "fp8"), dtype=dtype), load(str(tmp_path / "plain"), dtype=dtype)
        assert found.config == expected.config
        jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


def test_float8_without_scales_is_cast_where_nothing_says_quantised(tmp_path: Path):
    weights = {name: value.astype(E4M3) for name, value in hf_weights("llama").items()}
    write_hf(tmp_path / "m", hf_config("llama"), {"model.safetensors": weights})
    params = load(str(tmp_path / "m"), dtype="bfloat16").params
    expected = weights["model.embed_tokens.weight"].astype(np.float32).astype(jnp.bfloat16)
    np.testing.assert_array_equal(params["embedding"], expected)


def test_scales_where_nothing_says_quantised(tmp_path: Path):
    stored, _ = quantise(hf_weights("llama"), "_scale", "tensor")
    write_hf(tmp_path / "m", hf_config("llama"), {"model.safetensors": stored})
    with pytest.raises(CheckpointError, match=r"weight_scale of shape \(\) is surplus"):
        load(str(tmp_path / "m"), dtype="float32")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_missing_scale_is_named(tmp_path: Path, name: str):
    stored, _ = quantise(hf_weights("llama"), "_scale_inv", "block")
    del stored[f"{name}_scale_inv"]
    write_hf(tmp_path / "m", hf_config("llama", quantization_config=FP8), {"model.safetensors": stored})
    with pytest.raises(CheckpointError, match=f"'{name}' is float8; expected its scale"):
        load(str(tmp_path / "m"), dtype="float32")


def test_bytes_are_no_weights(tmp_path: Path):
    weights = hf_weights("llama")
    weights["lm_head.weight"] = weights["lm_head.weight"].astype(np.uint8)
    write_hf(tmp_path / "m", hf_config("llama"), {"model.safetensors": weights})
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is stored as U8"):
        load(str(tmp_path / "m"), dtype="float32")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "mxfp8", "", None, 7, ["fp8"]])
def test_another_method_is_named(tmp_path: Path, method: Any):
    write_hf(
        tmp_path / "m",
        hf_config("llama", quantization_config={"quant_method": method, "bits": 4}),
        {"model.safetensors": hf_weights("llama")},
    )
    with pytest.raises(ConfigError, match="quant_method") as refusal:
        load(str(tmp_path / "m"), dtype="float32")
    assert repr(method) in str(refusal.value)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> SafetensorsDirectory:
    directory = tmp_path_factory.mktemp("plain")
    save_file({"a": np.ones((2, 3), np.float32)}, directory / "model.safetensors")
    return SafetensorsDirectory(directory)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": [128, 0]}, "weight_block_size"),
        ({**FP8, "weight_block_size": [128, True]}, "weight_block_size"),
        ({**FP8, "weight_block_size": "128"}, "weight_block_size"),
        ({**FP8, "weight_block_size": {"a": 1}}, "weight_block_size"),
        ({**FP8, "scale_fmt": "int"}, "scale_fmt"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype"),
        ({**FP8, "activation_scheme": 3}, "activation_scheme"),
        ({**compressed(), "format": "pack-quantized"}, "format"),
        ({**compressed(), "quantization_status": "initialized"}, "quantization_status"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({**compressed(), "transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
        ({**compressed(), "config_groups": []}, "config_groups"),
        ({**compressed(), "config_groups": {"g": 1}}, "g is 1"),
        ({**compressed(), "config_groups": {"g": {"weights": 8}}}, "weights is 8"),
        (compressed("group"), "strategy"),
        (compressed("block"), "block_structure"),
        (compressed(num_bits=4), "num_bits"),
        (compressed(type="int"), "type"),
        (compressed(symmetric=False), "symmetric"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo"),
        ({"quant_method": "gptq"}, "quant_method"),
        (["fp8"], "quantization_config"),
        ("fp8", "quantization_config"),
    ],
)
def test_a_variant_that_is_not_read_is_named(plain: SafetensorsDirectory, config: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        decoded(plain, {"quantization_config": config})


@pytest.mark.parametrize("config", [None, {}])
def test_no_quantisation(plain: SafetensorsDirectory, config: Any):
    assert decoded(plain, {"quantization_config": config}).tensors is plain
