"""Configurations that others wrote: both spellings of everything, and an error that names what nobody implemented."""

from functools import partial
from typing import Any

import pytest

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families import config_from_gguf, config_from_hf, family_of

from .makers import gguf_metadata, without

gguf_fields = partial(gguf_metadata, block_count=3, rope__freq_base=500_000.0)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 64,
    "rope_theta": 1_000_000,
    "rope_local_base_freq": 10_000,
    "sliding_window": 16,
    "sliding_window_pattern": 6,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
GGUF_SHAPES = {"token_embd.weight": (100, 64), "output.weight": (100, 64)}


# ---- llama -----------------------------------------------------------------------------------------------------------


@pytest.mark.proves(family="llama", what="config")
def test_llama_is_read():
    assert config_from_hf(LLAMA) == ModelConfig(
        family="llama",
        vocab_size=100,
        width=64,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp_width=96,
        context=256,
        query_scale=0.25,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500_000.0),
    )


def test_a_head_size_of_its_own():
    config = config_from_hf({**LLAMA, "head_dim": 64})
    assert (config.head_dim, config.query_scale) == (64, 0.125)


@pytest.mark.proves(family="llama", what="config")
def test_attention_bias_is_on_the_output_projection_too():
    config = config_from_hf({**LLAMA, "attention_bias": True})
    assert config.attention_bias
    assert config.output_bias


@pytest.mark.proves(family="llama", what="config")
def test_the_rope_is_read_by_the_rules_of_ropes():
    config = config_from_hf({**LLAMA, "rope_scaling": LLAMA3_ROPE})
    assert config.rope == RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 128)
    stretched = config_from_hf({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    assert (stretched.rope.kind, stretched.context) == ("dynamic", 4 * config.context)
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        config_from_hf({**LLAMA, "rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("mlp_bias", "yes"),
        ("rope_interleaved", True),
        ("num_experts", 8),
        ("clip_qkv", 8.0),
        ("layer_types", ["sliding_attention"] * 3),
        ("use_qk_norm", True),
        ("final_logit_softcapping", 30.0),
        ("sliding_window", 16),
        ("partial_rotary_factor", 0.5),
        ("attention_multiplier", 0.01),
        ("residual_multiplier", 0.2),
        ("embedding_multiplier", 12.0),
        ("logits_scaling", 8.0),
        ("quantization_config", {"quant_method": "gptq"}),
        ("attention_bias", "yes"),
        ("tie_word_embeddings", 1),
        ("hidden_size", 0),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("hidden_size", None),
        ("vocab_size", 2**31),
        ("num_hidden_layers", 2**40),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "1e-5"),
        ("rope_theta", float("inf")),
    ],
)
def test_a_value_that_nobody_implemented(field: str, value: Any):
    name = {"num_key_value_heads": "kv_heads"}.get(field, field)
    with pytest.raises(ConfigError, match=name):
        config_from_hf({**LLAMA, field: value})


@pytest.mark.parametrize("architectures", [["MambaForCausalLM"], ["LlamaForCausalLM", "X"], "LlamaForCausalLM", [7]])
def test_an_unknown_architecture_is_named(architectures: Any):
    with pytest.raises(ConfigError, match=r"architecture is .*expected one of LlamaForCausalLM"):
        config_from_hf({**LLAMA, "architectures": architectures})
    with pytest.raises(ConfigError, match="expected one of"):
        config_from_hf({})


def test_the_model_type_serves_where_there_is_no_architecture():
    assert config_from_hf(without(LLAMA, "architectures")) == config_from_hf(LLAMA)


@pytest.mark.proves(family="mistral", what="config")
def test_mistral_has_a_window_on_every_layer_or_on_none():
    assert config_from_hf(MISTRAL).windows == (32, 32, 32)
    assert config_from_hf({**MISTRAL, "sliding_window": None}).windows == ()
    with pytest.raises(ConfigError, match="attention_bias"):
        config_from_hf({**MISTRAL, "attention_bias": True})


@pytest.mark.proves(family="mistral", what="config")
def test_what_a_mistral_leaves_out_is_what_transformers_takes_for_it():
    config = config_from_hf(without({**MISTRAL, "num_attention_heads": 16}, "sliding_window", "num_key_value_heads"))
    assert (config.windows, config.kv_heads) == ((4096,) * 3, 8)
    assert config_from_hf({**MISTRAL, "num_key_value_heads": None}).kv_heads == 4


# ---- gemma 3 ---------------------------------------------------------------------------------------------------------


@pytest.mark.proves(family="gemma3", what="config")
def test_gemma3_is_read():
    config = config_from_hf(GEMMA)
    assert config.windows == (16, 16, 16, 16, 16, None, 16, 16)
    assert (config.layer_rope(5).theta, config.layer_rope(4).theta) == (1_000_000.0, 10_000.0)
    assert (config.query_scale, config.embedding_scale) == (64**-0.5, 8.0)
    assert config.activation == "gelu_tanh"
    assert config.tied_head
    assert config.qk_norm
    assert config.post_norms


@pytest.mark.proves(family="gemma3", what="config")
def test_both_spellings_of_gemma3_are_the_same():
    kinds = ["full_attention" if i == 5 else "sliding_attention" for i in range(8)]
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    new = without(GEMMA, "rope_theta", "rope_local_base_freq", "sliding_window_pattern")
    assert config_from_hf({**new, "layer_types": kinds, "rope_parameters": ropes}) == config_from_hf(GEMMA)


def test_gemma3_stretches_the_global_rope_alone():
    config = config_from_hf({**GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert config.rope == RopeConfig(1_000_000.0, "linear", 8.0)
    assert config.local_rope == RopeConfig(10_000.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_activation", "gelu"),
        ("use_bidirectional_attention", True),
        ("attn_logit_softcapping", 50.0),
        ("layer_types", ["sliding_attention"] * 7),
        ("layer_types", ["sliding_attention"] * 7 + ["chunked_attention"]),
        ("layer_types", "full_attention"),
        ("layer_types", [["full_attention"]] * 8),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("sliding_window", -1),
        ("final_logit_softcapping", 0),
    ],
)
def test_a_gemma3_that_nobody_implemented(field: str, value: Any):
    with pytest.raises(ConfigError, match=field):
        config_from_hf({**GEMMA, field: value})


# ---- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.mark.proves(family="llama", what="config")
def test_gguf_llama_is_the_same_model():
    assert config_from_gguf(gguf_fields("llama"), GGUF_SHAPES) == config_from_hf(LLAMA)


def test_gguf_ties_the_head_where_there_is_none():
    assert config_from_gguf(gguf_fields("llama"), {"token_embd.weight": (100, 64)}).tied_head


def test_gguf_stretched_rope():
    fields = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    config = config_from_gguf(gguf_fields("llama", **fields), GGUF_SHAPES)
    assert (config.rope.kind, config.rope.factor, config.context) == ("yarn", 4.0, 4 * config_from_hf(LLAMA).context)


@pytest.mark.proves(family="gemma3", what="config")
def test_gguf_gemma3_knows_what_the_file_does_not_say():
    fields = gguf_fields("gemma3", **{"attention.sliding_window": 16, "attention.key_length": 32, "block_count": 7})
    config = config_from_gguf(fields, {"token_embd.weight": (100, 64)})
    assert config.windows == (16, 16, 16, 16, 16, None, 16)
    assert config.local_rope == RopeConfig(10_000.0)
    assert config.query_scale == 32**-0.5
    assert (config.embedding_scale, config.tied_head, config.activation) == (8.0, True, "gelu_tanh")


def test_gguf_gemma3_27b_scales_queries_by_width_over_heads():
    fields = gguf_fields("gemma3", **{"attention.sliding_window": 16, "attention.key_length": 32, "block_count": 62})
    assert config_from_gguf(fields, GGUF_SHAPES).query_scale == 16**-0.5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("expert_used_count", 8),
        ("rope.scaling.type", "ntk"),
        ("rope.dimension_count", 8),
        ("attention.scale", 0.01),
        ("residual_scale", 0.2),
        ("embedding_scale", 12.0),
        ("logit_scale", 8.0),
        ("attention.value_length", 8),
        ("attention.head_count", [4, 4, 2]),
        ("block_count", 2**32),
        ("context_length", "long"),
    ],
)
def test_a_gguf_that_nobody_implemented(field: str, value: Any):
    with pytest.raises(ConfigError, match=field):
        config_from_gguf(gguf_fields("llama", **{field: value}), GGUF_SHAPES)


def test_an_unknown_gguf_architecture_is_named():
    with pytest.raises(ConfigError, match="'bert'; expected one of llama, qwen2"):
        config_from_gguf(gguf_fields("bert"), GGUF_SHAPES)
    with pytest.raises(ConfigError, match=r"token_embd\.weight"):
        config_from_gguf(gguf_fields("llama"), {})


def test_an_unknown_family_is_named():
    assert family_of("mistral").hf.naming is family_of("llama").hf.naming
    with pytest.raises(ConfigError, match="'mamba'; expected one of llama, mistral"):
        family_of("mamba")
