"""Mixtral, gpt-oss and DeepSeek V3: what their files mean, and what is refused by name."""

import math
from functools import partial
from typing import Any

import pytest

from jaxinfer.config import ExpertsConfig, LatentConfig, RopeConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families import config_from_gguf, config_from_hf, family_of, unread_tensors

from .makers import gguf_metadata

gguf = partial(gguf_metadata, rope__freq_base=None)

SIZES = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
MIXTRAL = {
    **SIZES,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.0,
    "sliding_window": None,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
GPT_OSS = {
    **SIZES,
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 32,
    "attention_bias": True,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "sliding_window": 16,
    "swiglu_limit": 7.0,
    "rope_theta": 150_000,
    "rope_scaling": {**YARN, "truncate": False},
}
DEEPSEEK = {
    **SIZES,
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 40,
    "moe_layer_freq": 1,
    "n_group": 4,
    "topk_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "num_nextn_predict_layers": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "ep_size": 1,
    "rope_theta": 10_000,
    "rope_scaling": {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **dict(list(YARN.items())[1:])},
}
FAMILIES = {"mixtral": MIXTRAL, "gpt_oss": GPT_OSS, "deepseek_v3": DEEPSEEK}
SHAPES = {"token_embd.weight": (100, 64), "output.weight": (100, 64)}


GGUF_YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 64,
}
GGUF_MIXTRAL = gguf("llama", expert_count=4, expert_used_count=2, rope__freq_base=1_000_000.0)
GGUF_GPT_OSS = gguf(
    "gpt-oss",
    attention__key_length=32,
    attention__value_length=32,
    attention__sliding_window=16,
    expert_count=8,
    expert_used_count=4,
    expert_feed_forward_length=96,
    rope__freq_base=150_000.0,
    **GGUF_YARN,
)
GGUF_DEEPSEEK = gguf(
    "deepseek2",
    attention__head_count_kv=1,
    attention__kv_lora_rank=24,
    attention__q_lora_rank=20,
    attention__key_length=32,
    attention__value_length=24,
    attention__key_length_mla=20,
    attention__value_length_mla=16,
    rope__dimension_count=8,
    rope__freq_base=10_000.0,
    rope__scaling__yarn_log_multiplier=0.1,
    leading_dense_block_count=1,
    expert_count=8,
    expert_used_count=3,
    expert_feed_forward_length=40,
    expert_shared_count=2,
    expert_group_count=4,
    expert_group_used_count=2,
    expert_weights_scale=2.5,
    expert_weights_norm=True,
    expert_gating_func=2,
    **GGUF_YARN,
)
BIASED = {**SHAPES, "blk.0.attn_q.bias": (128,), "blk.0.attn_output.bias": (64,)}
GGUF_FILES = {
    "mixtral": (GGUF_MIXTRAL, SHAPES),
    "gpt_oss": (GGUF_GPT_OSS, BIASED),
    "deepseek_v3": (GGUF_DEEPSEEK, {**SHAPES, "blk.1.exp_probs_b.bias": (8,)}),
}


# ---- mixtral ---------------------------------------------------------------------------------------------------------


@pytest.mark.proves(family="mixtral", what="config")
def test_mixtral_is_read():
    config = config_from_hf(MIXTRAL)
    assert config.experts == ExpertsConfig(count=4, active=2, width=96)
    assert (config.rope, config.windows, config.attention_bias) == (RopeConfig(1_000_000.0), (), False)
    assert config_from_hf({**MIXTRAL, "sliding_window": 32}).windows == (32,) * 4


# ---- gpt-oss ---------------------------------------------------------------------------------------------------------


@pytest.mark.proves(family="gpt_oss", what="config")
def test_gpt_oss_is_read():
    config = config_from_hf(GPT_OSS)
    assert config.experts == ExpertsConfig(count=8, active=4, width=96, router_bias=True)
    assert (config.sinks, config.attention_bias, config.output_bias, config.mlp_bias) == (True,) * 4
    assert (config.activation, config.windows) == ("swiglu_clamped", (16, None, 16, None))
    assert (config.rope.theta, config.rope.kind, config.rope.truncate) == (150_000.0, "yarn", False)
    assert config.rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert config_from_hf({**GPT_OSS, "layer_types": kinds}).windows == (None, 16, None, None)


# ---- deepseek v3 -----------------------------------------------------------------------------------------------------


@pytest.mark.proves(family="deepseek_v3", what="config")
def test_deepseek_v3_is_read():
    config = config_from_hf(DEEPSEEK)
    assert config.latent == LatentConfig(rank=24, rope_dim=8, content_dim=12, value_dim=16, query_rank=20)
    assert (config.head_dim, config.kv_heads, config.dense_layers) == (20, 4, (0,))
    assert config.experts == ExpertsConfig(
        count=8,
        active=3,
        width=40,
        scoring="sigmoid",
        scale=2.5,
        groups=4,
        active_groups=2,
        selection_bias=True,
        shared_width=80,
    )
    assert config_from_hf({**DEEPSEEK, "q_lora_rank": None}).latent.query_rank is None
    assert config_from_hf({**DEEPSEEK, "first_k_dense_replace": 0}).dense_layers == ()
    assert config_from_hf({**DEEPSEEK, "first_k_dense_replace": 9}).dense_layers == (0, 1, 2, 3)
    assert config_from_hf({**DEEPSEEK, "n_shared_experts": 0}).experts.shared_width == 0


@pytest.mark.proves(family="deepseek_v3", what="config")
def test_mscale_grows_the_scores_and_not_the_rope():
    config, growth = config_from_hf(DEEPSEEK), 0.1 * math.log(4) + 1
    assert config.query_scale == pytest.approx(20**-0.5 * growth**2)
    assert config.rope.attention_factor == 1
    plain = config_from_hf({**DEEPSEEK, "rope_scaling": None})
    assert (plain.query_scale, plain.rope) == (20**-0.5, RopeConfig())
    without = config_from_hf({**DEEPSEEK, "rope_scaling": YARN})
    assert without.query_scale == 20**-0.5
    assert without.rope.attention_factor == pytest.approx(growth)


@pytest.mark.proves(family="deepseek_v3", what="names")
def test_the_layers_that_draft_tokens_are_not_read():
    """`num_hidden_layers` is 4: 0 to 3 are the decoder's; a layer is one that drafts by what it alone has."""
    config, naming = config_from_hf(DEEPSEEK), family_of("deepseek_v3").hf.naming
    drafting = {f"model.layers.4.{name}.weight" for name in ("eh_proj", "enorm", "self_attn.o_proj", "embed_tokens")}
    own = {"model.layers.3.eh_proj.weight", "model.layers.40.self_attn.o_proj.weight", "model.embed_tokens.weight"}
    assert unread_tensors(config, naming, drafting | own) == drafting
    assert not unread_tensors(config, naming, own | {"model.layers.4.self_attn.o_proj.weight"})
    assert not unread_tensors(config, naming, {f"model.layers.{'9' * 5000}.eh_proj.weight"})
    assert not unread_tensors(config, family_of("qwen3_moe").hf.naming, drafting)


# ---- both formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.proves(family=name, what="config")) for name in FAMILIES]
)
def test_a_gguf_file_is_the_same_model(family: str):
    found, expected = config_from_gguf(*GGUF_FILES[family]), config_from_hf(FAMILIES[family])
    assert found.query_scale == pytest.approx(expected.query_scale)
    assert found == type(found)(
        **{**{f: getattr(expected, f) for f in found.__slots__}, "query_scale": found.query_scale}
    )


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("mixtral", "hidden_act", "gelu"),
        ("mixtral", "attention_bias", True),
        ("mixtral", "num_local_experts", 0),
        ("mixtral", "sliding_window", 0),
        ("mixtral", "n_shared_experts", 1),
        ("gpt_oss", "swiglu_limit", 6.0),
        ("gpt_oss", "swiglu_alpha", 1.5),
        ("gpt_oss", "experts_per_token", 2),
        ("gpt_oss", "rope_scaling", None),
        ("gpt_oss", "layer_types", ["chunked_attention"] * 4),
        ("gpt_oss", "hidden_act", "gelu"),
        ("deepseek_v3", "attention_bias", True),
        ("deepseek_v3", "rope_interleave", False),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "group_limited_greedy"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "num_key_value_heads", 2),
        ("deepseek_v3", "n_group", 3),
        ("deepseek_v3", "topk_group", 5),
        ("deepseek_v3", "qk_rope_head_dim", 7),
        ("deepseek_v3", "sliding_window", 32),
        ("deepseek_v3", "q_lora_rank", 0),
    ],
)
def test_a_value_that_nobody_implemented(family: str, field: str, value: Any):
    name = {"n_group": "groups", "topk_group": "active_groups", "qk_rope_head_dim": "rope_dim"}.get(field, field)
    with pytest.raises(ConfigError, match=name):
        config_from_hf({**FAMILIES[family], field: value})


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("mixtral", "llama.expert_used_count", 5),
        ("mixtral", "llama.expert_gating_func", 2),
        ("mixtral", "llama.expert_shared_count", 1),
        ("gpt_oss", "gpt-oss.attention.sliding_window_pattern", [True, False, True, False]),
        ("gpt_oss", "gpt-oss.attention.sliding_window", 0),
        ("gpt_oss", "gpt-oss.rope.freq_base_swa", 10_000.0),
        ("deepseek_v3", "deepseek2.expert_gating_func", 1),
        ("deepseek_v3", "deepseek2.expert_gating_func", None),
        ("deepseek_v3", "deepseek2.expert_group_count", None),
        ("deepseek_v3", "deepseek2.expert_group_used_count", None),
        ("deepseek_v3", "deepseek2.nextn_predict_layers", 1),
        ("deepseek_v3", "deepseek2.attention.key_length_mla", None),
        ("deepseek_v3", "deepseek2.attention.key_length", 20),
        ("deepseek_v3", "deepseek2.attention.head_count_kv", 4),
        ("deepseek_v3", "deepseek2.attention.temperature_scale", 0.1),
        ("deepseek_v3", "deepseek2.rope.scaling.yarn_log_multiplier", None),
        ("deepseek_v3", "deepseek2.rope.scaling.attn_factor", 1.2),
    ],
)
def test_a_gguf_that_nobody_implemented(family: str, field: str, value: Any):
    fields, shapes = GGUF_FILES[family]
    name = {"llama.expert_used_count": "active experts"}.get(field, field.partition(".")[2])
    with pytest.raises(ConfigError, match=name):
        config_from_gguf({**fields, field: value}, shapes)
