"""Gemma 1 and 2: a scaled embedding, norms stored minus one; Gemma 2 norms after each part too, and caps its scores.

Sources: arXiv 2403.08295, 2408.00118; transformers' GemmaConfig and Gemma2Config; llama.cpp's `gemma` and `gemma2`.
"""

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.model.families import llama
from jaxinfer.model.families.fields import MAX_LAYERS, Fields
from jaxinfer.model.families.leaves import Naming
from jaxinfer.model.families.sizes import Shapes, Windows, every, windows_by_type

HF = Naming(llama.HF.names, norm_offset=1.0)
HF2 = Naming(
    {
        **llama.HF.names,
        "block/attention_post_norm": ("model.layers.{i}.post_attention_layernorm.weight",),
        "block/mlp_norm": ("model.layers.{i}.pre_feedforward_layernorm.weight",),
        "block/mlp_post_norm": ("model.layers.{i}.post_feedforward_layernorm.weight",),
    },
    norm_offset=1.0,
)
GGUF2 = Naming(
    {
        **llama.GGUF.names,
        "block/attention_post_norm": ("blk.{i}.post_attention_norm.weight",),
        "block/mlp_post_norm": ("blk.{i}.post_ffw_norm.weight",),
    }
)
"""llama.cpp's converter has already added the one to every norm, and leaves q and k rows as they are."""

_TANH = "gelu_pytorch_tanh"
_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 8192}
_DEFAULTS2 = {
    **_DEFAULTS,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_PATTERN2 = 2
_LAYERS2_27B = 46


def gemma_from_hf(fields: Fields) -> ModelConfig:
    """GemmaForCausalLM. Its files say `gelu` for what was trained with the tanh form, as transformers knows too."""
    fields = fields.with_defaults(_DEFAULTS)
    fields.expect("hidden_act", _TANH, "gelu")
    fields.expect("hidden_activation", None, _TANH)
    return llama.dense_from_hf(fields, "gemma", acts=None, **_switches(fields.whole("hidden_size")))


def gemma2_from_hf(fields: Fields) -> ModelConfig:
    """Gemma2ForCausalLM: of each two layers the first has a window, unless `layer_types` says otherwise."""
    fields = fields.with_defaults(_DEFAULTS2)
    fields.expect("hidden_activation", _TANH)
    return llama.dense_from_hf(
        fields,
        "gemma2",
        acts=None,
        **_switches(fields.whole("hidden_size")),
        post_norms=True,
        windows=_windows2(fields),
        query_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def _switches(width: int) -> Mapping[str, Any]:
    return {"activation": "gelu_tanh", "embedding_scale": width**0.5}


def _windows2(fields: Fields) -> Windows:
    layers = fields.whole("num_hidden_layers", high=MAX_LAYERS)
    window = fields.optional_whole("sliding_window")
    by_type = windows_by_type(fields, layers, window)
    if by_type is not None:
        return by_type
    return () if window is None else every(_PATTERN2, window, layers)


def gemma_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `gemma`."""
    return llama.dense_from_gguf(fields, shapes, "gemma", "gemma", **_switches(fields.whole("gemma.embedding_length")))


def gemma2_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `gemma2`; the file says nothing of the pattern (2) and of the queries' scale."""
    layers, width = fields.whole("gemma2.block_count", high=MAX_LAYERS), fields.whole("gemma2.embedding_length")
    # The 27B model alone scales by width / heads (144) instead of head_dim (128); no field says so.
    scalar = fields.whole("gemma2.attention.key_length", 256)
    if layers == _LAYERS2_27B:
        scalar = width / fields.whole("gemma2.attention.head_count")
    return llama.dense_from_gguf(
        fields,
        shapes,
        "gemma2",
        "gemma2",
        **_switches(width),
        post_norms=True,
        windows=every(_PATTERN2, fields.whole("gemma2.attention.sliding_window", 4096), layers),
        query_scale=scalar**-0.5,
        attention_softcap=fields.number("gemma2.attn_logit_softcapping", 50.0),
        logit_softcap=fields.number("gemma2.final_logit_softcapping", 30.0),
    )
