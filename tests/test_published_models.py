"""`config.json` as makers publish it: read without a complaint, and with the number of weights that they name."""

from typing import Any

import pytest

from jaxinfer.model.families import read_hf
from jaxinfer.roofline import block_weights, head_weights, total_weights

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def published(architecture: str, *sizes: int, kv_heads: int, context: int, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_act": "silu",
        **dict(zip(SIZES, sizes, strict=True)),
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "attention_dropout": 0.0,
        **fields,
    }


QWEN3 = {
    "attention_bias": False,
    "head_dim": 128,
    "max_window_layers": 28,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "use_sliding_window": False,
}
GPT_OSS = {
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "initial_context_length": 4096,
    "num_experts_per_tok": 4,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150_000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}
DEEPSEEK = {
    "attention_bias": False,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}
MODELS = {
    "Qwen2.5-7B": published(
        *("Qwen2", 152_064, 3584, 18_944, 28, 28),
        kv_heads=4,
        context=32_768,
        max_window_layers=28,
        rope_theta=1_000_000.0,
        sliding_window=131_072,
        use_sliding_window=False,
    ),
    "Qwen3-0.6B": published(
        *("Qwen3", 151_936, 1024, 3072, 28, 16), kv_heads=8, context=40_960, **{**QWEN3, "tie_word_embeddings": True}
    ),
    "Qwen3-30B-A3B": published(
        *("Qwen3Moe", 151_936, 2048, 6144, 48, 32),
        kv_heads=4,
        context=40_960,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_experts=128,
        num_experts_per_tok=8,
        **QWEN3,
    ),
    "Mixtral-8x7B": published(
        *("Mixtral", 32_000, 4096, 14_336, 32, 32),
        kv_heads=8,
        context=32_768,
        num_experts_per_tok=2,
        num_local_experts=8,
        rope_theta=1_000_000.0,
        sliding_window=None,
    ),
    "gpt-oss-20b": published(
        *("GptOss", 201_088, 2880, 2880, 24, 64), kv_heads=8, context=131_072, num_local_experts=32, **GPT_OSS
    ),
    "gpt-oss-120b": published(
        *("GptOss", 201_088, 2880, 2880, 36, 64), kv_heads=8, context=131_072, num_local_experts=128, **GPT_OSS
    ),
    "DeepSeek-V3": published(
        *("DeepseekV3", 129_280, 7168, 18_432, 61, 128),
        kv_heads=128,
        context=163_840,
        ep_size=1,
        first_k_dense_replace=3,
        moe_intermediate_size=2048,
        n_group=8,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        num_nextn_predict_layers=1,
        q_lora_rank=1536,
        quantization_config={"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        rms_norm_eps=1e-06,
        rope_scaling={
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        rope_theta=10_000,
        routed_scaling_factor=2.5,
        topk_group=4,
        **DEEPSEEK,
    ),
    "Moonlight-16B-A3B": published(
        *("DeepseekV3", 163_840, 2048, 11_264, 27, 16),
        kv_heads=16,
        context=8192,
        first_k_dense_replace=1,
        moe_intermediate_size=1408,
        n_group=1,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        num_nextn_predict_layers=0,
        q_lora_rank=None,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=50_000.0,
        routed_scaling_factor=2.446,
        topk_group=1,
        **DEEPSEEK,
    ),
}
WEIGHTS = {
    "Qwen2.5-7B": (7.61, 7.61),
    "Qwen3-0.6B": (0.6, 0.6),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Mixtral-8x7B": (46.7, 12.9),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
    "DeepSeek-V3": (671.0, 37.0),
    "Moonlight-16B-A3B": (16.0, 2.24 + 0.34),  # whose card leaves the head out
}
"""Billions of weights, and of those that a token passes, as the cards say; some count the embedding among them."""


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_has_the_weights_that_its_card_names(name: str):
    config, ignored = read_hf(MODELS[name])
    whole, active = WEIGHTS[name]
    assert round(total_weights(config) / 1e9, 2 if whole < 10 else 1) == pytest.approx(whole, abs=0.011)
    assert (block_weights(config, tokens=1) + head_weights(config)) / 1e9 == pytest.approx(active, rel=0.1)
    harmless = {"attention_dropout", "torch_dtype", "initial_context_length", "ep_size", "num_nextn_predict_layers"}
    assert set(ignored) <= {*harmless, "seq_aux"}


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "gpt-oss-20b", "DeepSeek-V3"])
def test_a_published_model_serves_the_context_that_its_card_names(name: str):
    assert read_hf(MODELS[name])[0].context == MODELS[name]["max_position_embeddings"]
