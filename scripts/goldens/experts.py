"""Tiny models of the families with a mixture of experts.

llama.cpp's files cannot say everything; `gguf` of a row lists what its reader takes for granted instead:
* `qwen3moe` always divides a token's weights by their sum and has no dense layer: no file of another is made;
* `gpt-oss` has a window on every other layer from the first, and bounds of yarn that are not rounded;
* `deepseek2` takes `mscale` for equal to `mscale_all_dim`. Its latents are normed with the file's epsilon, those of
  transformers with 1e-6 whatever `rms_norm_eps` says: these models have 1e-6.
"""

from dataclasses import replace

import transformers  # pyright: ignore[reportMissingImports]

from . import mxfp4
from .recipe import QUIETER, Fields, Tiny, as_before_5, plain_rope, sizes

YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
GPT_OSS_YARN = YARN | {"truncate": False}


def tiny_mixtral() -> Tiny:
    """Two of four experts a token, their weights the softmax over those two."""
    config = transformers.MixtralConfig(
        **sizes(layers=2, intermediate_size=24), num_local_experts=4, num_experts_per_tok=2
    )
    without = {"experts of a token": {"num_experts_per_tok": 1}, "theta": plain_rope()}
    return Tiny(config, 14, without, louder={r"mlp\.gate\.": 2.0} | QUIETER, written=as_before_5)


def tiny_qwen3_moe() -> Tiny:
    """Norms on every head, three of six experts a token, their weights divided by their sum."""
    config = transformers.Qwen3MoeConfig(**_qwen3_moe(layers=2), norm_topk_prob=True)
    without = {"weights' sum": {"norm_topk_prob": False}, "experts of a token": {"num_experts_per_tok": 2}}
    return Tiny(config, 15, without, ("q_norm", "k_norm"), {r"mlp\.gate\.": 2.0})


def tiny_qwen3_moe_dense() -> Tiny:
    """Weights as the softmax over all experts gives them; every other layer sparse, and one of those made dense."""
    config = transformers.Qwen3MoeConfig(
        **_qwen3_moe(layers=4),
        norm_topk_prob=False,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        tie_word_embeddings=True,
    )
    return Tiny(
        config, 16, {"weights' sum": {"norm_topk_prob": True}}, (), {r"mlp\.gate\.": 2.0}, as_before_5, gguf=None
    )


def _qwen3_moe(layers: int) -> Fields:
    return sizes(layers) | {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 3}


def tiny_gpt_oss() -> Tiny:
    """Sinks, biases everywhere, clamped experts, windows on every other layer, yarn whose bounds are not rounded."""
    return _gpt_oss(17)


def tiny_gpt_oss_mxfp4() -> Tiny:
    """The same with experts of four bits a weight, as the hub holds them, the rest in bfloat16."""
    return _gpt_oss(18, packed=mxfp4.pack, written=mxfp4.written)


def _gpt_oss(seed: int, **changes: object) -> Tiny:
    fields = sizes(layers=2, intermediate_size=32)
    config = transformers.GptOssConfig(
        **fields, num_local_experts=4, num_experts_per_tok=2, sliding_window=9, rope_parameters=dict(GPT_OSS_YARN)
    )
    without = {
        "clamp": {"swiglu_limit": 1e9},
        "window": {"layer_types": ["full_attention"] * 2},
        "layers with a window": {"layer_types": ["full_attention", "sliding_attention"]},
        "bounds not rounded": {"rope_parameters": GPT_OSS_YARN | {"truncate": True}},
        "yarn": plain_rope(100.0),
    }
    neutral = (
        "sinks",
        r"[qkv]_proj\.bias",
        r"o_proj\.bias",
        r"router\.bias",
        "gate_up_proj_bias",
        "down_proj_bias",
    )
    return Tiny(config, seed, without, neutral, {r"router\.": 2.0, "sinks": 4.0, r"gate_up_proj$": 2.0}, **changes)  # pyright: ignore[reportArgumentType]


def tiny_deepseek_v3() -> Tiny:
    """Latent attention with latent queries, a dense layer first, groups, biased choice, shared experts, scaled yarn."""
    return _deepseek(29, YARN | {"mscale": 0.8, "mscale_all_dim": 0.8}, q_lora_rank=20, n_shared_experts=1)


def tiny_deepseek_v3_direct() -> Tiny:
    """Queries straight from the stream, two shared experts, weights not divided by their sum, mscale of its own."""
    rope = YARN | {"mscale": 0.6, "mscale_all_dim": 1.2}
    tiny = _deepseek(86, rope, q_lora_rank=None, n_shared_experts=2, norm_topk_prob=False)
    return replace(tiny, louder=QUIETER)


def _deepseek(seed: int, rope: Fields, **changes: object) -> Tiny:
    fields = sizes(layers=3, num_key_value_heads=4, rms_norm_eps=1e-6)
    del fields["head_dim"]
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 12}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_group": 4}
    config = transformers.DeepseekV3Config(
        **fields,
        **latent,
        **experts,
        topk_group=2,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        num_mtp_layers=0,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        rope_parameters=rope,
        tie_word_embeddings=False,
        **changes,
    )
    without = {
        "groups": {"n_group": 1, "topk_group": 1},
        "groups of a token": {"topk_group": 3},
        "weights' scale": {"routed_scaling_factor": 1.0},
        "weights' sum": {"norm_topk_prob": not config.norm_topk_prob},
        "mscale": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        "mscale_all_dim": {"rope_parameters": YARN},
        "interleaved rope": {"rope_interleave": False},
    }
    neutral = ("e_score_correction_bias", "kv_a_layernorm", *(("q_a_layernorm",) if config.q_lora_rank else ()))
    same = rope["mscale"] == rope["mscale_all_dim"]
    return Tiny(
        config,
        seed,
        without,
        neutral,
        {r"mlp\.gate\.weight": 0.7},
        as_before_5,
        gguf={} if same else {"rope_parameters": rope | {"mscale": rope["mscale_all_dim"]}},
    )


SPARSE = (
    tiny_mixtral,
    tiny_qwen3_moe,
    tiny_qwen3_moe_dense,
    tiny_gpt_oss,
    tiny_gpt_oss_mxfp4,
    tiny_deepseek_v3,
    tiny_deepseek_v3_direct,
)
