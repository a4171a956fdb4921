"""Qwen 2, Qwen 3 and its mixture of experts: what their files mean, and what is refused by name."""

from functools import partial
from typing import Any

import pytest

from jaxinfer.config import ExpertsConfig, RopeConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families import config_from_gguf, config_from_hf, read_hf

from .makers import gguf_metadata, without

gguf = partial(gguf_metadata, attention__layer_norm_rms_epsilon=1e-6, rope__freq_base=1_000_000.0)

SIZES = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
}
QWEN2 = {
    **SIZES,
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": False,
    "sliding_window": 32,
    "max_window_layers": 2,
}
QWEN3 = {**SIZES, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "attention_bias": False}
MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "max_window_layers": 4,
}
EXPERTS = ExpertsConfig(count=6, active=3, width=24)
FULL, SLIDING = "full_attention", "sliding_attention"
SHAPES = {"token_embd.weight": (100, 64), "output.weight": (100, 64)}


@pytest.mark.proves(family="qwen2", what="config")
def test_qwen2_has_biases_on_q_k_and_v_alone():
    config = config_from_hf(QWEN2)
    assert (config.attention_bias, config.output_bias, config.qk_norm) == (True, False, None)
    assert (config.head_dim, config.rope, config.tied_head) == (16, RopeConfig(1_000_000.0), False)


@pytest.mark.proves(family="qwen2", what="config")
def test_a_window_of_qwen2_counts_only_when_it_is_used():
    assert config_from_hf(QWEN2).windows == ()
    used = {**QWEN2, "use_sliding_window": True}
    assert config_from_hf(used).windows == (None, None, 32, 32)
    assert config_from_hf({**used, "max_window_layers": 0}).windows == (32,) * 4
    assert config_from_hf({**used, "max_window_layers": 4}).windows == ()
    assert config_from_hf({**used, "sliding_window": None}).windows == ()
    assert config_from_hf({**used, "layer_types": [SLIDING, FULL, FULL, SLIDING]}).windows == (32, None, None, 32)
    assert config_from_hf({**used, "layer_types": [FULL] * 4}).windows == ()


@pytest.mark.proves(family="qwen2", what="config")
def test_what_a_qwen2_leaves_out_is_what_transformers_takes_for_it():
    bare = without(
        {**QWEN2, "hidden_size": 512, "num_attention_heads": 64, "use_sliding_window": True},
        "num_key_value_heads",
        "sliding_window",
    )
    assert config_from_hf(bare).kv_heads == 32
    assert config_from_hf({**bare, "max_window_layers": 3}).windows == (None, None, None, 4096)
    assert config_from_hf({**QWEN2, "num_key_value_heads": None}).kv_heads == 4


@pytest.mark.proves(family="qwen2", what="config")
def test_qwen2_may_be_stretched_by_yarn():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = config_from_hf({**QWEN2, "rope_scaling": scaling})
    assert (config.rope.kind, config.context) == ("yarn", 1024)


@pytest.mark.proves(family="qwen3", what="config")
def test_qwen3_norms_every_head():
    config = config_from_hf(QWEN3)
    assert (config.qk_norm, config.head_dim, config.attention_bias) == ("head", 32, False)
    assert config_from_hf(without(QWEN3, "head_dim")).head_dim == 128
    biased = config_from_hf({**QWEN3, "attention_bias": True})
    assert (biased.attention_bias, biased.output_bias) == (True, True)


@pytest.mark.proves(family="qwen3_moe", what="config")
def test_qwen3_moe_is_read_in_both_spellings():
    config = config_from_hf(MOE)
    assert (config.experts, config.dense_layers, config.qk_norm) == (EXPERTS, (), "head")
    assert config_from_hf({**without(MOE, "num_experts"), "num_local_experts": 6}) == config
    with pytest.raises(ConfigError, match="num_local_experts"):
        config_from_hf({**MOE, "num_local_experts": 7})


@pytest.mark.proves(family="qwen3_moe", what="config")
def test_weights_are_divided_by_their_sum_only_where_the_file_says_so():
    assert not config_from_hf(without(MOE, "norm_topk_prob")).experts.normalised


@pytest.mark.proves(family="qwen3_moe", what="config")
def test_layers_without_experts():
    assert config_from_hf({**MOE, "mlp_only_layers": [0, 3]}).dense_layers == (0, 3)
    assert config_from_hf({**MOE, "decoder_sparse_step": 2}).dense_layers == (0, 2)
    assert config_from_hf({**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [1]}).dense_layers == (0, 1, 2)


@pytest.mark.proves(family="qwen3_moe", what="config")
def test_a_window_of_qwen3_moe_holds_on_every_layer():
    config = config_from_hf({**MOE, "use_sliding_window": True, "sliding_window": 16})
    assert config.windows == (16,) * 4


@pytest.mark.parametrize(
    ("raw", "field", "value"),
    [
        (QWEN2, "hidden_act", "gelu"),
        (QWEN2, "attention_bias", "no"),
        (QWEN2, "mlp_bias", True),
        (QWEN2, "use_sliding_window", "yes"),
        (QWEN2, "max_window_layers", -1),
        (QWEN2, "layer_types", [SLIDING, FULL, FULL, FULL]),
        (QWEN2, "layer_types", [FULL] * 3),
        (QWEN2, "partial_rotary_factor", 0.5),
        (QWEN2, "dual_chunk_attention_config", {"chunk_size": 64}),
        (QWEN3, "mlp_bias", True),
        (QWEN3, "num_experts", 8),
        (QWEN3, "rope_scaling", {"rope_type": "mrope"}),
        (MOE, "num_experts", 0),
        (MOE, "num_experts_per_tok", 7),
        (MOE, "mlp_only_layers", 3),
        (MOE, "mlp_only_layers", ["3"]),
        (MOE, "decoder_sparse_step", 0),
        (MOE, "shared_expert_intermediate_size", 64),
        (MOE, "layer_types", [SLIDING] * 4),
    ],
)
def test_a_value_that_nobody_implemented(raw: dict[str, Any], field: str, value: Any):
    name = {"num_experts_per_tok": "active experts"}.get(field, field)
    with pytest.raises(ConfigError, match=name):
        config_from_hf({**raw, field: value})


def test_what_changes_nothing_is_listed_and_not_refused():
    assert read_hf(MOE)[1] == ("router_aux_loss_coef",)


# ---- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.mark.proves(family="qwen2", what="config")
@pytest.mark.proves(family="qwen3", what="config")
def test_gguf_files_are_the_same_models():
    assert config_from_gguf(gguf("qwen2"), {**SHAPES, "blk.0.attn_q.bias": (64,)}) == config_from_hf(QWEN2)
    head = {"attention__key_length": 32, "attention__value_length": 32}
    assert config_from_gguf(gguf("qwen3", **head), SHAPES) == config_from_hf(QWEN3)


GGUF_MOE = {
    "attention__key_length": 32,
    "attention__value_length": 32,
    "expert_count": 6,
    "expert_used_count": 3,
    "expert_feed_forward_length": 24,
}


@pytest.mark.proves(family="qwen3_moe", what="config")
def test_a_gguf_qwen3_moe_is_the_same_model():
    assert config_from_gguf(gguf("qwen3moe", **GGUF_MOE), SHAPES) == config_from_hf(MOE)
    for scale, expected in ((0.0, 1.0), (2.5, 2.5)):
        scaled = config_from_gguf(gguf("qwen3moe", **GGUF_MOE, expert_weights_scale=scale), SHAPES)
        assert scaled.experts.scale == expected


@pytest.mark.parametrize(
    ("arch", "field", "value"),
    [
        ("qwen2", "attention.causal", False),
        ("qwen2", "expert_count", 4),
        ("qwen2", "attention.sliding_window", 32),
        ("qwen3", "rope.scaling.type", "ntk"),
        ("qwen3", "attention.scale", 0.5),
        ("qwen3moe", "expert_count", 0),
        ("qwen3moe", "expert_gating_func", 2),
        ("qwen3moe", "expert_shared_count", 1),
        ("qwen3moe", "expert_group_count", 2),
    ],
)
def test_a_gguf_that_nobody_implemented(arch: str, field: str, value: Any):
    fields = gguf(arch, **(GGUF_MOE if arch == "qwen3moe" else {}))
    with pytest.raises(ConfigError, match=field):
        config_from_gguf({**fields, f"{arch}.{field}": value}, SHAPES)
