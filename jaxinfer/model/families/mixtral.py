"""Mixtral: a llama whose MLP is a mixture of experts, the weights of a token's experts divided by their sum.

Sources: arXiv 2401.04088; transformers' MixtralConfig; llama.cpp's `llama`, with an `expert_count`.
"""

from jaxinfer.config import ExpertsConfig, ModelConfig
from jaxinfer.model.families import llama
from jaxinfer.model.families.experts import GGUF_EXPERTS, active_weights_scale
from jaxinfer.model.families.fields import MAX_LAYERS, Fields
from jaxinfer.model.families.leaves import Naming
from jaxinfer.model.families.sizes import Shapes, everywhere

HF = Naming(
    {
        **llama.HF.names,
        "block/experts/router": ("model.layers.{i}.block_sparse_moe.gate.weight",),
        "block/experts/gate_up": (
            "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
            "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
        ),
        "block/experts/down": ("model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",),
    }
)
GGUF = Naming({**llama.GGUF_PAIRED.names, **GGUF_EXPERTS}, llama.GGUF_PAIRED.layouts)

_THETA = 1_000_000.0
_DEFAULTS = {
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}


def mixtral_from_hf(fields: Fields) -> ModelConfig:
    """MixtralForCausalLM; a window holds on every layer."""
    fields = fields.with_defaults(_DEFAULTS)
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    layers = fields.whole("num_hidden_layers", high=MAX_LAYERS)
    window = fields.optional_whole("sliding_window")
    experts = ExpertsConfig(
        count=fields.whole("num_local_experts"),
        active=fields.whole("num_experts_per_tok"),
        width=fields.whole("intermediate_size"),
    )
    windows = everywhere(window, layers)
    return llama.dense_from_hf(fields, "mixtral", theta=_THETA, windows=windows, experts=experts)


def llama_or_mixtral_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `llama`: Mixtral where it has experts, else Llama."""
    if fields.get("llama.expert_count", 0) == 0:
        fields.expect("llama.expert_used_count", 0)
        return llama.llama_from_gguf(fields, shapes)
    experts = ExpertsConfig(
        count=fields.whole("llama.expert_count"),
        active=fields.whole("llama.expert_used_count"),
        width=fields.whole("llama.feed_forward_length"),
        scale=active_weights_scale(fields, "llama"),
    )
    return llama.dense_from_gguf(fields, shapes, "llama", "mixtral", experts=experts)
