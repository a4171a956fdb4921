"""The llama family: Llama 1 to 3.x, SmolLM2, Mistral 7B and what else says it is one of them.

Sources: transformers' LlamaConfig and MistralConfig; llama.cpp's `llama` architecture.
"""

from functools import partial
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.model.families.fields import MAX_LAYERS, Fields
from jaxinfer.model.families.gguf_ropes import rope_from_gguf
from jaxinfer.model.families.leaves import Naming, heads_apart
from jaxinfer.model.families.ropes import rope_from_hf, stretched_context
from jaxinfer.model.families.sizes import Shapes, everywhere, sizes_from_gguf, sizes_from_hf

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
        "block/mlp/gate_up_bias": ("model.layers.{i}.mlp.gate_proj.bias", "model.layers.{i}.mlp.up_proj.bias"),
        "block/mlp/down": ("model.layers.{i}.mlp.down_proj.weight",),
        "block/mlp/down_bias": ("model.layers.{i}.mlp.down_proj.bias",),
    },
    unused=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),  # Llama 2's files hold what theta says already
)

GGUF = Naming(
    {
        "embedding": ("token_embd.weight",),
        "final_norm": ("output_norm.weight",),
        "head": ("output.weight",),
        "block/attention_norm": ("blk.{i}.attn_norm.weight",),
        "block/attention/qkv": ("blk.{i}.attn_q.weight", "blk.{i}.attn_k.weight", "blk.{i}.attn_v.weight"),
        "block/attention/qkv_bias": ("blk.{i}.attn_q.bias", "blk.{i}.attn_k.bias", "blk.{i}.attn_v.bias"),
        "block/attention/out": ("blk.{i}.attn_output.weight",),
        "block/attention/out_bias": ("blk.{i}.attn_output.bias",),
        "block/mlp_norm": ("blk.{i}.ffn_norm.weight",),
        "block/mlp/gate_up": ("blk.{i}.ffn_gate.weight", "blk.{i}.ffn_up.weight"),
        "block/mlp/gate_up_bias": ("blk.{i}.ffn_gate.bias", "blk.{i}.ffn_up.bias"),
        "block/mlp/down": ("blk.{i}.ffn_down.weight",),
        "block/mlp/down_bias": ("blk.{i}.ffn_down.bias",),
    }
)
"""Rows of q and k as they are in Hugging Face's files."""

_PAIRED = partial(heads_apart, interleaved=True)
GGUF_PAIRED = Naming(GGUF.names, layouts={"block/attention/qkv": _PAIRED, "block/attention/qkv_bias": _PAIRED})
"""Rows of q and k in pairs, as llama.cpp's converter leaves them for `llama` and the relatives that turn pairs."""


_MISTRAL_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}


def llama_from_hf(fields: Fields) -> ModelConfig:
    """LlamaForCausalLM; `attention_bias` puts a bias on q, k, v and on the output projection, as transformers does."""
    return dense_from_hf(fields, "llama")


def mistral_from_hf(fields: Fields) -> ModelConfig:
    """MistralForCausalLM: llama without biases, every layer windowed unless `sliding_window` is null.

    A field that is left out has MistralConfig's own default, which for these two is not what null means.
    """
    fields = fields.with_defaults(_MISTRAL_DEFAULTS)
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    window = fields.optional_whole("sliding_window")
    layers = fields.whole("num_hidden_layers", high=MAX_LAYERS)
    return dense_from_hf(fields, "mistral", windows=everywhere(window, layers))


def dense_from_hf(
    fields: Fields,
    family: str,
    *,
    acts: str | None = "silu",
    theta: float = 10_000.0,
    partial: bool = False,
    **switches: Any,
) -> ModelConfig:
    """A llama-shaped `config.json` of `family`, but for `switches` of ModelConfig.

    acts: what `hidden_act` must be; None where the family has seen to it. theta and partial: as for `rope_from_hf`.
    """
    if acts is not None:
        fields.expect("hidden_act", acts)
    sizes, bias = sizes_from_hf(fields), fields.flag("attention_bias", False)
    rope = rope_from_hf(fields, sizes["head_dim"], theta=theta, partial=partial)
    row = {
        **sizes,
        "context": stretched_context(rope, sizes["context"]),
        "query_scale": sizes["head_dim"] ** -0.5,
        "rope": rope,
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": fields.flag("mlp_bias", False),
    }
    return ModelConfig(family=family, **{**row, **switches})


def llama_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `llama`."""
    return dense_from_gguf(fields, shapes, "llama", "llama")


def dense_from_gguf(
    fields: Fields,
    shapes: Shapes,
    arch: str,
    family: str,
    *,
    theta: float = 10_000.0,
    partial: bool = False,
    **switches: Any,
) -> ModelConfig:
    """A llama-shaped GGUF file of architecture `arch`, as `dense_from_hf`; biases are there where their tensors are."""
    sizes = sizes_from_gguf(fields, shapes, arch)
    rope = rope_from_gguf(fields, shapes, arch, sizes["head_dim"], theta=theta, partial=partial)
    row = {
        **sizes,
        "context": stretched_context(rope, sizes["context"]),
        "query_scale": sizes["head_dim"] ** -0.5,
        "rope": rope,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "output_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }
    return ModelConfig(family=family, **{**row, **switches})
