"""Gemma 1 and 2, Phi-3, OLMo 2, SmolLM3 and Granite: what their files mean, and what is refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from jaxinfer.config import RopeConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families import config_from_gguf, config_from_hf, read_gguf, read_hf

from .makers import gguf_metadata, without

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
GEMMA = {**SIZES, "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu", "head_dim": 32}
GEMMA2 = {
    **SIZES,
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 32,
    "query_pre_attn_scalar": 64,
    "sliding_window": 16,
}
PHI3 = {**SIZES, "architectures": ["Phi3ForCausalLM"], "hidden_act": "silu"}
OLMO2 = {**SIZES, "architectures": ["Olmo2ForCausalLM"], "hidden_act": "silu"}
SMOLLM3 = {**SIZES, "architectures": ["SmolLM3ForCausalLM"], "hidden_act": "silu"}
GRANITE = {**SIZES, "architectures": ["GraniteForCausalLM"], "hidden_act": "silu"}
FAMILIES = {"gemma": GEMMA, "gemma2": GEMMA2, "phi3": PHI3, "olmo2": OLMO2, "smollm3": SMOLLM3, "granite": GRANITE}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 8.0]}
SHAPES = {"token_embd.weight": (100, 64), "output.weight": (100, 64)}


# ---- gemma -----------------------------------------------------------------------------------------------------------


@pytest.mark.proves(family="gemma", what="config")
def test_gemma_is_read():
    config = config_from_hf(GEMMA)
    assert (config.activation, config.embedding_scale, config.query_scale) == ("gelu_tanh", 8.0, 32**-0.5)
    assert config.tied_head
    assert not config.post_norms
    assert config_from_hf({**GEMMA, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": None}) == config
    assert config_from_hf(without(GEMMA, "head_dim")).head_dim == 256


@pytest.mark.proves(family="gemma", what="config")
def test_a_gguf_gemma_is_the_same_model():
    fields = gguf_metadata("gemma", attention__key_length=32, attention__value_length=32)
    assert config_from_gguf(fields, {"token_embd.weight": (100, 64)}) == config_from_hf(GEMMA)


@pytest.mark.proves(family="gemma2", what="config")
def test_gemma2_is_read():
    config = config_from_hf(GEMMA2)
    assert config.windows == (16, None, 16, None)
    assert (config.attention_softcap, config.logit_softcap, config.query_scale) == (50.0, 30.0, 0.125)
    assert config.post_norms
    assert config.qk_norm is None
    assert config_from_hf({**GEMMA2, "sliding_window": None}).windows == ()
    assert config_from_hf({**GEMMA2, "attn_logit_softcapping": None}).attention_softcap is None
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    assert config_from_hf({**GEMMA2, "layer_types": kinds}).windows == (None, None, 16, None)


@pytest.mark.proves(family="gemma2", what="config")
def test_a_gguf_gemma2_is_the_same_model():
    fields = gguf_metadata(
        "gemma2",
        attention__key_length=32,
        attention__value_length=32,
        attention__sliding_window=16,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    found = config_from_gguf(fields, {"token_embd.weight": (100, 64)})
    assert found == replace(config_from_hf(GEMMA2), query_scale=32**-0.5)
    big = config_from_gguf({**fields, "gemma2.block_count": 46}, {"token_embd.weight": (100, 64)})
    assert big.query_scale == 16**-0.5


# ---- phi3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.proves(family="phi3", what="config")
def test_phi3_is_read():
    config = config_from_hf({**PHI3, "sliding_window": 32})
    assert config.windows == (32,) * 4
    assert not config.tied_head
    part = config_from_hf({**PHI3, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64})
    assert part.rope == RopeConfig(dim=12)


@pytest.mark.proves(family="phi3", what="config")
@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_phi3_stretches_each_frequency_by_its_own_factor(kind: str):
    raw = {**PHI3, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75}
    rope = config_from_hf({**raw, "rope_scaling": {**LONGROPE, "type": kind}}).rope
    assert (rope.kind, rope.dim, rope.original_context, rope.long_factors[-1]) == ("longrope", 12, 64, 8.0)
    assert rope.attention_factor == pytest.approx((1 + 1 / 3) ** 0.5)  # factor 4 of 64 = 4**3 positions


@pytest.mark.proves(family="phi3", what="config")
def test_a_gguf_phi3_is_the_same_model():
    assert config_from_gguf(gguf_metadata("phi3", attention__sliding_window=0), SHAPES) == config_from_hf(PHI3)
    windowed = config_from_gguf(gguf_metadata("phi3", attention__sliding_window=32, rope__dimension_count=12), SHAPES)
    assert windowed == config_from_hf({**PHI3, "sliding_window": 32, "partial_rotary_factor": 0.75})


# ---- olmo2 -----------------------------------------------------------------------------------------------------------


@pytest.mark.proves(family="olmo2", what="config")
def test_olmo2_is_read():
    config = config_from_hf(OLMO2)
    assert (config.pre_norms, config.post_norms, config.qk_norm) == (False, True, "all")
    assert config_from_gguf(gguf_metadata("olmo2"), SHAPES) == config


# ---- smollm3 ---------------------------------------------------------------------------------------------------------


@pytest.mark.proves(family="smollm3", what="config")
def test_smollm3_is_read():
    config = config_from_hf(SMOLLM3)
    assert config.no_rope == (3,)
    assert (config.layer_rope(3), config.layer_rope(2)) == (None, RopeConfig(2_000_000.0))
    assert config.tied_head
    assert config_from_hf({**SMOLLM3, "no_rope_layer_interval": 2}).no_rope == (1, 3)
    assert config_from_hf({**SMOLLM3, "no_rope_layers": [0, 1, 1, 0]}).no_rope == (0, 3)
    assert config_from_hf({**SMOLLM3, "sliding_window": 16, "use_sliding_window": False}).windows == ()


@pytest.mark.proves(family="smollm3", what="config")
def test_smollm3_has_windows_where_nothing_turns_unless_the_file_says_otherwise():
    windowed = {**SMOLLM3, "sliding_window": 16, "use_sliding_window": True}
    assert config_from_hf(windowed).windows == (None, None, None, 16)
    kinds = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    assert config_from_hf({**windowed, "layer_types": kinds}).windows == (16, None, None, None)


@pytest.mark.proves(family="smollm3", what="config")
def test_a_gguf_smollm3_is_the_same_model():
    fields = {**gguf_metadata("smollm3"), "smollm3.rope.freq_base": 2_000_000.0}
    assert config_from_gguf(fields, {"token_embd.weight": (100, 64)}) == config_from_hf(SMOLLM3)


# ---- granite ---------------------------------------------------------------------------------------------------------

MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}


@pytest.mark.proves(family="granite", what="config")
def test_granite_is_read():
    config = config_from_hf({**GRANITE, **MULTIPLIERS})
    assert (config.embedding_scale, config.query_scale, config.residual_scale) == (12.0, 0.015625, 0.22)
    assert config.logit_scale == 0.125
    plain = config_from_hf(GRANITE)
    assert (plain.embedding_scale, plain.query_scale, plain.residual_scale, plain.logit_scale) == (1.0, 1.0, 1.0, 1.0)
    assert config_from_hf({**GRANITE, "mlp_bias": True}).mlp_bias


@pytest.mark.proves(family="granite", what="config")
def test_a_gguf_granite_is_the_same_model():
    scales = {"attention__scale": 0.015625, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0}
    assert config_from_gguf(gguf_metadata("granite", **scales), SHAPES) == config_from_hf({**GRANITE, **MULTIPLIERS})
    assert config_from_gguf(gguf_metadata("granite"), SHAPES).query_scale == 0.25


# ---- what is refused, and what is ignored ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("gemma", "hidden_act", "silu"),
        ("gemma", "hidden_activation", "gelu"),
        ("gemma", "sliding_window", 16),
        ("gemma", "use_bidirectional_attention", True),
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma2", "layer_types", ["chunked_attention"] * 4),
        ("gemma2", "final_logit_softcapping", 0),
        ("gemma2", "qk_norm", True),
        ("phi3", "hidden_act", "gelu"),
        ("phi3", "attention_bias", True),
        ("phi3", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("phi3", "rope_scaling", {**LONGROPE, "long_factor": [1.0] * 6}),
        ("olmo2", "clip_qkv", 8.0),
        ("olmo2", "sliding_window", 16),
        ("olmo2", "layer_types", ["sliding_attention"] * 4),
        ("olmo2", "mlp_bias", True),
        ("smollm3", "no_rope_layers", [1, 1]),
        ("smollm3", "no_rope_layers", [1, 1, 1, "0"]),
        ("smollm3", "use_sliding_window", "yes"),
        ("granite", "num_local_experts", 8),
        ("granite", "residual_multiplier", -1.0),
        ("granite", "sliding_window", 16),
    ],
)
def test_a_value_that_nobody_implemented(family: str, field: str, value: Any):
    with pytest.raises(ConfigError, match={"rope_scaling": "rope"}.get(field, field)):
        config_from_hf({**FAMILIES[family], field: value})


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize(
    ("field", "value"), [("expert_count", 8), ("attention.temperature_scale", 0.1), ("attention.causal", False)]
)
def test_metadata_that_nobody_implemented(arch: str, field: str, value: Any):
    with pytest.raises(ConfigError, match=field):
        config_from_gguf({**gguf_metadata(arch), f"{arch}.{field}": value}, SHAPES)


def test_what_is_ignored_is_told():
    harmless = {"torch_dtype": "bfloat16", "use_cache": True, "num_experts": 0, "attention_dropout": 0.0}
    _, ignored = read_hf({**GRANITE, **harmless})
    assert ignored == ("attention_dropout", "num_experts", "torch_dtype", "use_cache")
    fields = {**gguf_metadata("granite", vocab_size=100, expert_count=0), "general.name": "x"}
    _, ignored = read_gguf(fields, SHAPES)
    assert ignored == ("general.name", "granite.expert_count", "granite.vocab_size")
