"""The llama family: Llama 1 to 3.x, SmolLM2, Mistral 7B and what else says it is one of them.

Sources: transformers' LlamaConfig and MistralConfig; llama.cpp's `llama` architecture.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial

import numpy as np
from jaxtyping import Float

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families.fields import MAX_LAYERS, Fields, read_rope
from jaxinfer.model.families.leaves import Naming, heads_apart

Shapes = Mapping[str, tuple[int, ...]]

HF = Naming(
    {
        "embedding": ("model.embed_tokens.weight",),
        "final_norm": ("model.norm.weight",),
        "head": ("lm_head.weight",),
        "block/attention_norm": ("model.layers.{i}.input_layernorm.weight",),
        "block/attention/qkv": (
            "model.layers.{i}.self_attn.q_proj.weight",
            "model.layers.{i}.self_attn.k_proj.weight",
            "model.layers.{i}.self_attn.v_proj.weight",
        ),
        "block/attention/qkv_bias": (
            "model.layers.{i}.self_attn.q_proj.bias",
            "model.layers.{i}.self_attn.k_proj.bias",
            "model.layers.{i}.self_attn.v_proj.bias",
        ),
        "block/attention/out": ("model.layers.{i}.self_attn.o_proj.weight",),
        "block/attention/out_bias": ("model.layers.{i}.self_attn.o_proj.bias",),
        "block/mlp_norm": ("model.layers.{i}.post_attention_layernorm.weight",),
        "block/mlp/gate_up": ("model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.mlp.up_proj.weight"),
        "block/mlp/down": ("model.layers.{i}.mlp.down_proj.weight",),
    }
)

GGUF = Naming(
    {
        "embedding": ("token_embd.weight",),
        "final_norm": ("output_norm.weight",),
        "head": ("output.weight",),
        "block/attention_norm": ("blk.{i}.attn_norm.weight",),
        "block/attention/qkv": ("blk.{i}.attn_q.weight", "blk.{i}.attn_k.weight", "blk.{i}.attn_v.weight"),
        "block/attention/out": ("blk.{i}.attn_output.weight",),
        "block/mlp_norm": ("blk.{i}.ffn_norm.weight",),
        "block/mlp/gate_up": ("blk.{i}.ffn_gate.weight", "blk.{i}.ffn_up.weight"),
        "block/mlp/down": ("blk.{i}.ffn_down.weight",),
    },
    layouts={"block/attention/qkv": partial(heads_apart, interleaved=True)},
)


_UNIMPLEMENTED_HF = {
    "mlp_bias": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Fields of Llama's relatives, Granite's among them, that change the arithmetic, with the values that do not."""
_UNIMPLEMENTED_GGUF = {
    "expert_count": 0,
    "rope.scale_linear": 1.0,
    "attention.scale": None,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "logit_scale": 1.0,
}
_MISTRAL_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}


def llama_from_hf(fields: Fields) -> ModelConfig:
    """LlamaForCausalLM; `attention_bias` puts a bias on q, k, v and on the output projection, as transformers does."""
    fields.expect("sliding_window", None)
    bias = fields.flag("attention_bias", False)
    return _from_hf(fields, "llama", windows=(), bias=bias)


def mistral_from_hf(fields: Fields) -> ModelConfig:
    """MistralForCausalLM: llama without biases, every layer windowed unless `sliding_window` is null.

    A field that is left out has MistralConfig's own default, which for these two is not what null means.
    """
    fields = Fields({**_MISTRAL_DEFAULTS, **fields.raw}, fields.where)
    fields.expect("attention_bias", False)
    window = None if fields.get("sliding_window") is None else fields.whole("sliding_window")
    layers = fields.whole("num_hidden_layers", high=MAX_LAYERS)
    return _from_hf(fields, "mistral", windows=(window,) * layers if window else (), bias=False)


def _from_hf(fields: Fields, family: str, windows: tuple[int | None, ...], bias: bool) -> ModelConfig:
    fields.expect("hidden_act", "silu")
    for name, neutral in _UNIMPLEMENTED_HF.items():
        fields.expect(name, neutral)
    width, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head_dim = fields.whole("head_dim", width // heads)
    return ModelConfig(
        family=family,
        vocab_size=fields.whole("vocab_size"),
        width=width,
        layers=fields.whole("num_hidden_layers", high=MAX_LAYERS),
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        mlp_width=fields.whole("intermediate_size"),
        context=fields.whole("max_position_embeddings"),
        query_scale=head_dim**-0.5,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope_from_hf(fields),
        windows=windows,
        tied_head=fields.flag("tie_word_embeddings", False),
        attention_bias=bias,
        output_bias=bias,
    )


def _rope_from_hf(fields: Fields) -> RopeConfig:
    """transformers 4 writes `rope_theta` beside `rope_scaling`; 5 writes both into `rope_parameters`."""
    spec = fields.mapping("rope_parameters") or fields.mapping("rope_scaling")
    return read_rope(spec, fields.number("rope_theta", 10_000.0), f"{fields.where} rope")


def llama_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `llama`: the vocabulary is the embedding's rows; the head is tied where `output.weight` is absent."""
    for name, neutral in _UNIMPLEMENTED_GGUF.items():
        fields.expect(f"llama.{name}", neutral)
    width, heads = fields.whole("llama.embedding_length"), fields.whole("llama.attention.head_count")
    head_dim = fields.whole("llama.attention.key_length", width // heads)
    fields.expect("llama.attention.value_length", head_dim)
    fields.expect("llama.rope.dimension_count", head_dim)
    return ModelConfig(
        family="llama",
        vocab_size=shapes["token_embd.weight"][0],
        width=width,
        layers=fields.whole("llama.block_count", high=MAX_LAYERS),
        heads=heads,
        kv_heads=fields.whole("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_width=fields.whole("llama.feed_forward_length"),
        context=fields.whole("llama.context_length"),
        query_scale=head_dim**-0.5,
        norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
        rope=rope_from_gguf(fields, "llama", 10_000.0),
        tied_head="output.weight" not in shapes,
    )


def rope_from_gguf(fields: Fields, prefix: str, theta: float) -> RopeConfig:
    """The rotary embedding of a GGUF file; only linear scaling has metadata of its own that we know."""
    theta = fields.number(f"{prefix}.rope.freq_base", theta)
    fields.expect(f"{prefix}.rope.scaling.type", "none", "linear")
    fields.expect(f"{prefix}.rope.scaling.attn_factor", 1.0)
    if fields.get(f"{prefix}.rope.scaling.type") != "linear":
        fields.expect(f"{prefix}.rope.scaling.factor", 1.0)
        return RopeConfig(theta=theta)
    return RopeConfig(theta=theta, kind="linear", factor=fields.number(f"{prefix}.rope.scaling.factor"))


def with_rope_factors(config: ModelConfig, factors: Float[np.ndarray, " half"]) -> ModelConfig:
    """The configuration whose rope is stretched as `rope_freqs.weight` of a Llama 3.x GGUF file says.

    The file holds what each frequency is divided by, and not the rule behind it. Every Llama 3.x has the same rule but
    for its factor, which is the divisor of the lowest frequency. Raises ConfigError where that rule gives others.
    """
    if not np.all(np.isfinite(factors)) or factors.shape != (config.head_dim // 2,) or factors[-1] < 1:
        raise ConfigError(
            f"rope_freqs.weight of shape {factors.shape} holds no divisors of {config.head_dim // 2} phases"
        )
    rope = RopeConfig(config.rope.theta, "llama3", float(factors[-1]), 1.0, 4.0, 8_192)
    if config.rope.kind != "default" or not np.allclose(factors, _llama3_factors(rope, config.head_dim), rtol=1e-4):
        raise ConfigError("rope_freqs.weight stretches the rope in a way that is not Llama 3's; it is not implemented")
    return dataclasses.replace(config, rope=rope)


def _llama3_factors(rope: RopeConfig, head_dim: int) -> Float[np.ndarray, " half"]:
    """What llama3's rule divides each frequency by."""
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = rope.original_context * frequencies / (2 * math.pi)
    keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return 1 / (keep + (1 - keep) / rope.factor)
