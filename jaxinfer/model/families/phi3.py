"""Phi-3, Phi-3.5 and Phi-4: q, k and v in one tensor, gate and up in another; some turn only a part of each head.

Sources: arXiv 2404.14219; transformers' Phi3Config; llama.cpp's `phi3`.
"""

from jaxinfer.config import ModelConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families import llama
from jaxinfer.model.families.fields import MAX_LAYERS, Fields
from jaxinfer.model.families.leaves import Naming, heads_together
from jaxinfer.model.families.sizes import Shapes, everywhere

_JOINED = {"block/attention/qkv": heads_together}
HF = Naming(
    {
        **llama.HF.names,
        "block/attention/qkv": ("model.layers.{i}.self_attn.qkv_proj.weight",),
        "block/mlp/gate_up": ("model.layers.{i}.mlp.gate_up_proj.weight",),
    },
    _JOINED,
)
GGUF = Naming(
    {
        **llama.GGUF.names,
        "block/attention/qkv": ("blk.{i}.attn_qkv.weight",),
        "block/mlp/gate_up": ("blk.{i}.ffn_up.weight",),
    },
    _JOINED,
)

_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}


def phi3_from_hf(fields: Fields) -> ModelConfig:
    """Phi3ForCausalLM; `sliding_window` holds on every layer. Of the kinds of rope, only default and longrope occur."""
    fields = fields.with_defaults(_DEFAULTS)
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    window = fields.optional_whole("sliding_window")
    windows = everywhere(window, fields.whole("num_hidden_layers", high=MAX_LAYERS))
    config = llama.dense_from_hf(fields, "phi3", partial=True, windows=windows)
    if config.rope.kind not in ("default", "longrope"):
        raise ConfigError(f"{fields.where}: rope is {config.rope.kind!r}; expected default or longrope for phi3")
    return config


def phi3_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `phi3`; a window of 0 is none."""
    window = fields.get("phi3.attention.sliding_window", 0)
    window = fields.whole("phi3.attention.sliding_window") if window != 0 else None
    windows = everywhere(window, fields.whole("phi3.block_count", high=MAX_LAYERS))
    return llama.dense_from_gguf(fields, shapes, "phi3", "phi3", partial=True, windows=windows)
