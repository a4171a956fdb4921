"""Tiny models of the families without experts.

llama.cpp's files cannot say everything; `gguf` of a row lists what its reader takes for granted instead:
* `llama` has no window, so a file of Mistral's or a windowed qwen2 means a model that sees all;
* `gemma2` has a window on every other layer from the first, and divides queries by the root of the head size;
* `gemma3` has a full layer at every sixth alone, and the same division;
* `phi3` of a rope that nothing stretches is refused by the converter, and its windows are ignored by llama.cpp.
"""

import transformers  # pyright: ignore[reportMissingImports]

from .recipe import QUIETER, Fields, Tiny, as_before_5, plain_rope, sizes

SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.05, 1.1, 1.3, 1.6, 2.0],
    "long_factor": [1.0, 1.4, 2.0, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": 32,
}


def tiny_llama() -> Tiny:
    """Llama 3's stretched rope, biases, a head size that is not width / heads, an untied head."""
    config = transformers.LlamaConfig(
        **sizes(layers=2), attention_bias=True, rope_parameters=dict(LLAMA3), tie_word_embeddings=False
    )
    return Tiny(config, 0, {"rope": plain_rope()}, (r"[qkv]_proj\.bias", r"o_proj\.bias"))


def tiny_llama_yarn() -> Tiny:
    """Yarn, spelled as before transformers 5; biases on the MLP's matrices."""
    config = transformers.LlamaConfig(
        **sizes(layers=2), rope_parameters=dict(YARN), tie_word_embeddings=True, mlp_bias=True
    )
    without = {
        "yarn": plain_rope(100.0),
        "betas": {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 2.0}},
        "truncation": {"rope_parameters": YARN | {"truncate": False}},
        "attention factor": {"rope_parameters": YARN | {"attention_factor": 1.0}},
    }
    return Tiny(config, 3, without, (r"(gate|up)_proj\.bias", r"down_proj\.bias"), louder=QUIETER, written=as_before_5)


def tiny_mistral() -> Tiny:
    """A window on every layer; a tied head."""
    config = transformers.MistralConfig(**sizes(layers=2), sliding_window=7, tie_word_embeddings=True)
    return Tiny(
        config,
        1,
        {"window": {"sliding_window": None}, "width of the window": {"sliding_window": 8}},
        gguf={"sliding_window": None},
    )


def tiny_gemma() -> Tiny:
    """Embeddings times the root of the width, norms stored less 1, gelu, one key and value head."""
    config = transformers.GemmaConfig(**sizes(layers=2, num_key_value_heads=1))
    return Tiny(config, 4, {"gelu": {"hidden_act": "silu"}}, ("input_layernorm", "post_attention_layernorm"))


def tiny_gemma2() -> Tiny:
    """Capped attention and logits, windows on every other layer, four norms a layer, a query scale of its own."""
    config = transformers.Gemma2Config(
        **sizes(layers=3),
        sliding_window=9,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
    )
    without = {
        "attention's cap": {"attn_logit_softcapping": None},
        "logits' cap": {"final_logit_softcapping": None},
        "query scale": {"query_pre_attn_scalar": 12},
        "window": {"layer_types": [FULL] * 3},
        "layers with a window": {"layer_types": [FULL, SLIDING, FULL]},
    }
    return Tiny(
        config,
        5,
        without,
        ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        gguf={"query_pre_attn_scalar": 12},
    )


def tiny_gemma3() -> Tiny:
    """Windows on three of four layers, two thetas of which the global one is stretched, capped logits."""
    ropes = {
        FULL: {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 4.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    }
    config = transformers.Gemma3TextConfig(
        **sizes(layers=4),
        layer_types=[SLIDING, SLIDING, FULL, SLIDING],
        rope_parameters=ropes,
        sliding_window=9,
        query_pre_attn_scalar=24,
        final_logit_softcapping=8.0,
    )
    without = {
        "logits' cap": {"final_logit_softcapping": None},
        "query scale": {"query_pre_attn_scalar": 12},
        "layers with a window": {"layer_types": [SLIDING] * 4},
        "linear": {"rope_parameters": ropes | {FULL: ropes[FULL] | {"factor": 1.0}}},
        "local theta": {"rope_parameters": ropes | {SLIDING: ropes[FULL]}},
    }
    return Tiny(
        config, 2, without, ("q_norm", "k_norm"), gguf={"layer_types": [SLIDING] * 4, "query_pre_attn_scalar": 12}
    )


def tiny_qwen2() -> Tiny:
    """Biases on q, k and v alone; a window that is given and not used, as the hub's files have it; a tied head."""

    def written(fields: Fields) -> Fields:
        del fields["layer_types"]
        return fields | {"sliding_window": 7, "max_window_layers": 1}

    config = transformers.Qwen2Config(**_without_head_dim(layers=2), tie_word_embeddings=True)
    without = {"window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "layer_types": None}}
    return Tiny(config, 6, without, (r"[qkv]_proj\.bias",), written=written)


def tiny_qwen2_window() -> Tiny:
    """Windows from the second layer on, said by `max_window_layers` and not layer by layer."""

    def written(fields: Fields) -> Fields:
        del fields["layer_types"]
        return fields

    config = transformers.Qwen2Config(
        **_without_head_dim(layers=3),
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
        tie_word_embeddings=False,
    )
    without = {
        "window": {"use_sliding_window": False, "layer_types": None},
        "layers with a window": {"max_window_layers": 2, "layer_types": None},
    }
    gguf = {"use_sliding_window": False, "layer_types": None}
    return Tiny(config, 7, without, (r"[qkv]_proj\.bias",), written=written, gguf=gguf)


def tiny_qwen3() -> Tiny:
    """A norm on every head of queries and of keys; a tied head."""
    config = transformers.Qwen3Config(**sizes(layers=2), tie_word_embeddings=True)
    return Tiny(config, 8, {}, ("q_norm", "k_norm"))


def tiny_phi3() -> Tiny:
    """Longrope on three quarters of a head; q, k and v in one tensor, gate and up in another."""
    fields = _without_head_dim(layers=2, num_attention_heads=2, num_key_value_heads=1)
    config = transformers.Phi3Config(
        **fields, rope_parameters=dict(LONGROPE), original_max_position_embeddings=32, tie_word_embeddings=True
    )
    ones = [1.0] * 6
    without = {
        "long factors": {"rope_parameters": LONGROPE | {"long_factor": LONGROPE["short_factor"]}},
        "attention factor": {"rope_parameters": LONGROPE | {"attention_factor": 1.0}},
        "factors": {"rope_parameters": LONGROPE | {"long_factor": ones, "short_factor": ones}},
        "part": {
            "rope_parameters": LONGROPE
            | {"partial_rotary_factor": 1.0, "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}
        },
    }
    return Tiny(config, 9, without, louder=QUIETER, written=as_before_5, short=32)


def tiny_phi3_window() -> Tiny:
    """Phi 3's first form: a plain rope, a window on every layer, an untied head."""
    fields = _without_head_dim(layers=2, num_key_value_heads=4)
    config = transformers.Phi3Config(**fields, sliding_window=9, tie_word_embeddings=False)
    return Tiny(config, 10, {"window": {"sliding_window": None}}, written=as_before_5, gguf=None)


def tiny_olmo2() -> Tiny:
    """Norms on what attention and MLP give, none on what they take; one norm over all heads of queries, one of keys."""
    config = transformers.Olmo2Config(**_without_head_dim(layers=2), tie_word_embeddings=False)
    return Tiny(
        config,
        11,
        {},
        ("q_norm", "k_norm", "post_attention_layernorm", "post_feedforward_layernorm"),
        written=as_before_5,
    )


def tiny_smollm3() -> Tiny:
    """No rope on every fourth layer; a tied head."""
    config = transformers.SmolLM3Config(**_without_head_dim(layers=4), **plain_rope(5_000_000.0))
    without = {"layers without rope": {"no_rope_layers": [1] * 4}, "which": {"no_rope_layers": [0, 1, 1, 1]}}
    return Tiny(config, 12, without, written=as_before_5)


def tiny_granite() -> Tiny:
    """Multipliers on embedding, attention and residual, logits divided, biases everywhere; a tied head."""
    config = transformers.GraniteConfig(
        **_without_head_dim(layers=2),
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=0.25,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )
    multipliers = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    return Tiny(
        config,
        13,
        {name: {name: 1.0} for name in multipliers},
        (r"[qkv]_proj\.bias", r"o_proj\.bias", r"(gate|up)_proj\.bias", r"down_proj\.bias"),
        written=as_before_5,
    )


def _without_head_dim(layers: int, **changes: int) -> Fields:
    """Sizes of a family whose head size is width / heads."""
    fields = sizes(layers, **changes)
    del fields["head_dim"]
    return fields


DENSE = (
    tiny_llama,
    tiny_llama_yarn,
    tiny_mistral,
    tiny_gemma,
    tiny_gemma2,
    tiny_gemma3,
    tiny_qwen2,
    tiny_qwen2_window,
    tiny_qwen3,
    tiny_phi3,
    tiny_phi3_window,
    tiny_olmo2,
    tiny_smollm3,
    tiny_granite,
)
