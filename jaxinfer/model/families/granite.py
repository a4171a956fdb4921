"""Granite 3: a llama with four multipliers: of the embedding, the scores, what each part adds, and the logits.

Sources: transformers' GraniteConfig; llama.cpp's `granite`.
"""

from dataclasses import replace

from jaxinfer.config import ModelConfig
from jaxinfer.model.families import llama
from jaxinfer.model.families.fields import Fields
from jaxinfer.model.families.sizes import Shapes

_DEFAULTS = {"max_position_embeddings": 2048}


def granite_from_hf(fields: Fields) -> ModelConfig:
    """GraniteForCausalLM; `attention_multiplier` takes the place of 1 / sqrt(head_dim)."""
    return llama.dense_from_hf(
        fields.with_defaults(_DEFAULTS),
        "granite",
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        query_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


def granite_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `granite`; without `attention.scale` the scores have their usual scale."""
    scale = fields.optional_number("granite.attention.scale")
    usual = llama.dense_from_gguf(
        fields,
        shapes,
        "granite",
        "granite",
        embedding_scale=fields.number("granite.embedding_scale", 1.0),
        residual_scale=fields.number("granite.residual_scale", 1.0),
        logit_scale=1 / fields.number("granite.logit_scale", 1.0),
    )
    return usual if scale is None else replace(usual, query_scale=scale)
