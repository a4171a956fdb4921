"""OLMo 2: norms after attention and MLP and none before; queries and keys normed over all heads together.

Sources: arXiv 2501.00656; transformers' Olmo2Config; llama.cpp's `olmo2`.
"""

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.model.families import llama
from jaxinfer.model.families.fields import Fields
from jaxinfer.model.families.leaves import Naming
from jaxinfer.model.families.sizes import Shapes

HF = Naming(
    {
        **llama.HF.names,
        "block/attention/q_norm": ("model.layers.{i}.self_attn.q_norm.weight",),
        "block/attention/k_norm": ("model.layers.{i}.self_attn.k_norm.weight",),
        "block/attention_post_norm": ("model.layers.{i}.post_attention_layernorm.weight",),
        "block/mlp_post_norm": ("model.layers.{i}.post_feedforward_layernorm.weight",),
    }
)
GGUF = Naming(
    {
        **llama.GGUF.names,
        "block/attention/q_norm": ("blk.{i}.attn_q_norm.weight",),
        "block/attention/k_norm": ("blk.{i}.attn_k_norm.weight",),
        "block/attention_post_norm": ("blk.{i}.post_attention_norm.weight",),
        "block/mlp_post_norm": ("blk.{i}.post_ffw_norm.weight",),
    }
)

_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_SWITCHES: Mapping[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": "all"}


def olmo2_from_hf(fields: Fields) -> ModelConfig:
    """Olmo2ForCausalLM."""
    fields.expect("mlp_bias", False)
    return llama.dense_from_hf(fields.with_defaults(_DEFAULTS), "olmo2", **_SWITCHES)


def olmo2_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `olmo2`; a file with windows is one of OLMo 3, which is not implemented."""
    fields.expect("olmo2.attention.sliding_window", None, 0)
    return llama.dense_from_gguf(fields, shapes, "olmo2", "olmo2", **_SWITCHES)
