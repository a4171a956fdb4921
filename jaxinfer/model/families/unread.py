"""What becomes of the fields of a configuration that no family read: refused where they change the arithmetic.

Knows: the fields of other decoders that share these files. A `config.json` is full of fields that change nothing here
(dropout, initialisation, versions), so it is searched for those that do; GGUF metadata of an architecture holds little
else, so there whatever is not known to be harmless is refused.
"""

from collections.abc import Mapping
from typing import Any

from jaxinfer.model.families.fields import Fields

_NEVER: tuple[Any, ...] = (None,)
_OFF: tuple[Any, ...] = (False, 0)
_ONE: tuple[Any, ...] = (1,)

ARITHMETIC: Mapping[str, tuple[Any, ...]] = {
    # attention
    "alibi": _OFF,
    "attention_bias": _OFF,
    "attention_chunk_size": _NEVER,
    "attention_multiplier": _NEVER,
    "attn_logit_softcapping": _NEVER,
    "attn_temperature_tuning": _OFF,
    "clip_qkv": _NEVER,
    "cross_attention_layers": (None, []),
    "dual_chunk_attention_config": _NEVER,
    "head_dim": _NEVER,
    "is_causal": (True,),
    "key_multiplier": _ONE,
    "kv_lora_rank": _NEVER,
    "num_kv_shared_layers": _OFF,
    "q_lora_rank": _NEVER,
    "qk_layernorm": _OFF,
    "qk_norm": _OFF,
    "qkv_bias": _OFF,
    "query_pre_attn_scalar": _NEVER,
    "use_bidirectional_attention": _OFF,
    "use_qk_norm": _OFF,
    # windows and kinds of layers
    "attention_layers": _NEVER,
    "interleaved_sliding_window": _NEVER,
    "layer_types": _NEVER,
    "layers_block_type": _NEVER,
    "sliding_window": _NEVER,
    "sliding_window_pattern": (None, 1),
    "use_sliding_window": _OFF,
    # rotary embedding
    "global_rope_theta": _NEVER,
    "local_rope_theta": _NEVER,
    "no_rope_layers": (None, []),
    "partial_rotary_factor": _ONE,
    "position_embedding_type": ("rope", "rotary"),
    "rope_interleave": _OFF,
    "rope_interleaved": _OFF,
    "rope_local_base_freq": _NEVER,
    "rope_parameters": (None, {}),
    "rope_scaling": (None, {}),
    "rope_theta": _NEVER,
    "rotary_dim": _NEVER,
    "rotary_pct": _ONE,
    # MLP and experts
    "altup_num_inputs": _NEVER,
    "first_k_dense_replace": _OFF,
    "hidden_size_per_layer_input": _OFF,
    "laurel_rank": _NEVER,
    "mlp_bias": _OFF,
    "mlp_only_layers": (None, []),
    "n_group": _ONE,
    "n_routed_experts": _OFF,
    "n_shared_experts": _OFF,
    "num_experts": _OFF,
    "num_local_experts": _OFF,
    "routed_scaling_factor": _ONE,
    "shared_expert_intermediate_size": _OFF,
    "shared_intermediate_size": _OFF,
    "swiglu_alpha": _NEVER,
    "swiglu_limit": _NEVER,
    # residual stream, norms, logits
    "dim_model_base": _NEVER,
    "embedding_multiplier": _ONE,
    "final_logit_softcapping": _NEVER,
    "layer_norm_eps": _NEVER,
    "layer_norm_epsilon": _NEVER,
    "lm_head_multiplier": _ONE,
    "logit_scale": _ONE,
    "logits_scaling": _ONE,
    "parallel_attn": _OFF,
    "residual_multiplier": _ONE,
    "scale_depth": _NEVER,
    "scale_emb": _ONE,
    "lm_head_bias": _OFF,
    "tie_word_embeddings": _OFF,
    "use_bias": _OFF,
    "use_mup_embedding": _OFF,
    "use_parallel_residual": _OFF,
    # other models around a decoder
    "text_config": _NEVER,
    "vision_config": _NEVER,
}
"""Fields of a `config.json` that change a decoder's arithmetic, each with the values that do not."""

GGUF_HARMLESS = frozenset({"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "nextn_predict_layers"})
"""Metadata of an architecture that changes nothing here."""
GGUF_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.type": ("none",),
    "use_parallel_residual": (False, True),  # llama.cpp reads it for GPT-NeoX alone
}


def unread_of_hf(fields: Fields) -> tuple[str, ...]:
    """The fields of a `config.json` that nobody read and that change nothing; raises ConfigError for one that does."""
    for name, neutral in ARITHMETIC.items():
        if name in fields.raw and name not in fields.used:
            fields.expect(name, *neutral)
            fields.used.discard(name)
    return tuple(sorted(set(fields.raw) - fields.used))


def unread_of_gguf(fields: Fields, arch: str) -> tuple[str, ...]:
    """The metadata that nobody read; raises ConfigError for a field of the architecture that may change something."""
    for name in sorted(set(fields.raw) - fields.used):
        own = name.removeprefix(f"{arch}.")
        if own != name and own not in GGUF_HARMLESS:
            fields.expect(name, *GGUF_NEUTRAL.get(own, (None,)))
            fields.used.discard(name)
    return tuple(sorted(set(fields.raw) - fields.used))
