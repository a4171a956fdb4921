"""The llama family: Llama 1 to 3.x, SmolLM2, Mistral 7B and what else says it is one of them.

Sources: transformers' LlamaConfig and MistralConfig; llama.cpp's `llama` architecture.
"""

from collections.abc import Mapping
from functools import partial

from jaxinfer.config import ModelConfig
from jaxinfer.model.families.fields import MAX_LAYERS, Fields
from jaxinfer.model.families.gguf_ropes import rope_from_gguf
from jaxinfer.model.families.leaves import Naming, heads_apart
from jaxinfer.model.families.ropes import rope_from_hf, stretched_context

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
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Fields of Llama's relatives, Granite's among them, that change the arithmetic, with the values that do not."""
_UNIMPLEMENTED_GGUF = {
    "expert_count": 0,
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
    rope = rope_from_hf(fields, head_dim)
    return ModelConfig(
        family=family,
        vocab_size=fields.whole("vocab_size"),
        width=width,
        layers=fields.whole("num_hidden_layers", high=MAX_LAYERS),
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        mlp_width=fields.whole("intermediate_size"),
        context=stretched_context(rope, fields.whole("max_position_embeddings")),
        query_scale=head_dim**-0.5,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=windows,
        tied_head=fields.flag("tie_word_embeddings", False),
        attention_bias=bias,
        output_bias=bias,
    )


def llama_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `llama`: the vocabulary is the embedding's rows; the head is tied where `output.weight` is absent."""
    for name, neutral in _UNIMPLEMENTED_GGUF.items():
        fields.expect(f"llama.{name}", neutral)
    width, heads = fields.whole("llama.embedding_length"), fields.whole("llama.attention.head_count")
    head_dim = fields.whole("llama.attention.key_length", width // heads)
    fields.expect("llama.attention.value_length", head_dim)
    rope = rope_from_gguf(fields, shapes, "llama", head_dim)
    return ModelConfig(
        family="llama",
        vocab_size=shapes["token_embd.weight"][0],
        width=width,
        layers=fields.whole("llama.block_count", high=MAX_LAYERS),
        heads=heads,
        kv_heads=fields.whole("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_width=fields.whole("llama.feed_forward_length"),
        context=stretched_context(rope, fields.whole("llama.context_length")),
        query_scale=head_dim**-0.5,
        norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
        rope=rope,
        tied_head="output.weight" not in shapes,
    )
