"""Gemma 3, text only: qk-norm, four norms a block, windows on most layers with a rotary embedding of their own.

Sources: arXiv 2503.19786; transformers' Gemma3TextConfig; llama.cpp's `gemma3` architecture.
"""

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families.fields import Fields
from jaxinfer.model.families.gemma import GGUF2, HF2
from jaxinfer.model.families.gguf_ropes import rope_from_gguf
from jaxinfer.model.families.leaves import Naming
from jaxinfer.model.families.ropes import read_rope, rope_from_hf, stretched_context
from jaxinfer.model.families.sizes import Shapes, Windows, every, sizes_from_gguf, sizes_from_hf, windows_by_type

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_PATTERN = 6
_HEAD_DIM = 256
_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": _HEAD_DIM,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_LAYERS_27B = 62

HF = Naming(
    {
        **HF2.names,
        "block/attention/q_norm": ("model.layers.{i}.self_attn.q_norm.weight",),
        "block/attention/k_norm": ("model.layers.{i}.self_attn.k_norm.weight",),
    },
    norm_offset=1.0,
)
GGUF = Naming(
    {
        **GGUF2.names,
        "block/attention/q_norm": ("blk.{i}.attn_q_norm.weight",),
        "block/attention/k_norm": ("blk.{i}.attn_k_norm.weight",),
    }
)


def gemma3_from_hf(fields: Fields) -> ModelConfig:
    """Gemma3ForCausalLM (`gemma3_text`)."""
    fields = fields.with_defaults(_DEFAULTS)
    fields.expect("hidden_activation", "gelu_pytorch_tanh")
    fields.expect("use_bidirectional_attention", False)
    fields.expect("attn_logit_softcapping", None)  # a field that transformers reads and never applies
    sizes, bias = sizes_from_hf(fields), fields.flag("attention_bias", False)
    rope, local_rope = _ropes_from_hf(fields, sizes["head_dim"])
    row = {
        **sizes,
        **_switches(sizes["width"]),
        "context": stretched_context(rope, sizes["context"]),
        "query_scale": fields.number("query_pre_attn_scalar") ** -0.5,
        "rope": rope,
        "local_rope": local_rope,
        "windows": _windows_from_hf(fields, sizes["layers"]),
        "attention_bias": bias,
        "output_bias": bias,
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
    }
    return ModelConfig(family="gemma3", **row)


def _switches(width: int) -> Mapping[str, Any]:
    return {"activation": "gelu_tanh", "embedding_scale": width**0.5, "qk_norm": "head", "post_norms": True}


def _windows_from_hf(fields: Fields, layers: int) -> Windows:
    """By `layer_types`, or by the older `sliding_window_pattern`: every sixth layer sees everything."""
    window = fields.whole("sliding_window")
    by_pattern = every(_pattern(fields), window, layers)
    by_type = windows_by_type(fields, layers, window)
    return by_pattern if by_type is None else by_type


def _pattern(fields: Fields) -> int:
    """Written anew by transformers, a file has the pattern beside `layer_types`, which then hold; or underlined."""
    name = next((name for name in ("sliding_window_pattern", "_sliding_window_pattern") if fields.get(name)), "")
    return fields.whole(name) if name else _PATTERN


def _ropes_from_hf(fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embedding of the layers that see everything, and of those with a window.

    transformers 4 scales the first alone (`rope_scaling`); 5 has one object for each in `rope_parameters`.
    """
    theta = fields.number("rope_theta", _GLOBAL_THETA)
    local_theta = fields.number("rope_local_base_freq", _LOCAL_THETA)
    both = Fields(fields.mapping("rope_parameters"), f"{fields.where} rope_parameters")
    if not both.raw:
        return rope_from_hf(fields, head_dim, theta=_GLOBAL_THETA), RopeConfig(theta=local_theta)
    if set(both.raw) != {"full_attention", "sliding_attention"}:
        raise ConfigError(f"{both.where} has {sorted(both.raw)}; expected full_attention and sliding_attention")
    whole = read_rope(fields, both.mapping("full_attention"), theta, both.where, head_dim)
    return whole, read_rope(fields, both.mapping("sliding_attention"), local_theta, both.where, head_dim)


def gemma3_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `gemma3`; the file says nothing of the pattern (6) and of the windowed layers' theta (10,000)."""
    fields.expect("gemma3.attn_logit_softcapping", None)
    sizes = sizes_from_gguf(fields, shapes, "gemma3", head_dim=_HEAD_DIM)
    rope = rope_from_gguf(fields, shapes, "gemma3", sizes["head_dim"], theta=_GLOBAL_THETA)
    # The 27B model alone scales by width / heads (168) instead of head_dim (128); no field says so.
    scalar = sizes["width"] / sizes["heads"] if sizes["layers"] == _LAYERS_27B else sizes["head_dim"]
    pattern = fields.whole("gemma3.attention.sliding_window_pattern", _PATTERN)
    row = {
        **sizes,
        **_switches(sizes["width"]),
        "context": stretched_context(rope, sizes["context"]),
        "query_scale": scalar**-0.5,
        "rope": rope,
        "local_rope": RopeConfig(theta=fields.number("gemma3.rope.freq_base_swa", _LOCAL_THETA)),
        "windows": every(pattern, fields.whole("gemma3.attention.sliding_window"), sizes["layers"]),
        "logit_softcap": fields.optional_number("gemma3.final_logit_softcapping"),
    }
    return ModelConfig(family="gemma3", **row)
