"""Gemma 3, text only: qk-norm, four norms a block, windows on most layers with a rotary embedding of their own.

Sources: arXiv 2503.19786; transformers' Gemma3TextConfig; llama.cpp's `gemma3` architecture.
"""

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families import llama
from jaxinfer.model.families.fields import MAX_LAYERS, Fields
from jaxinfer.model.families.gguf_ropes import rope_from_gguf
from jaxinfer.model.families.leaves import Naming
from jaxinfer.model.families.llama import Shapes
from jaxinfer.model.families.ropes import read_rope, rope_from_hf

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_PATTERN = 6
_CONTEXT = 131_072
_LAYERS_27B = 62

HF = Naming(
    {
        **llama.HF.names,
        "block/attention/q_norm": ("model.layers.{i}.self_attn.q_norm.weight",),
        "block/attention/k_norm": ("model.layers.{i}.self_attn.k_norm.weight",),
        "block/attention_post_norm": ("model.layers.{i}.post_attention_layernorm.weight",),
        "block/mlp_norm": ("model.layers.{i}.pre_feedforward_layernorm.weight",),
        "block/mlp_post_norm": ("model.layers.{i}.post_feedforward_layernorm.weight",),
    },
    norm_offset=1.0,
)

# llama.cpp's converter has already added the one to every norm, and leaves q and k rows as they are.
GGUF = Naming(
    {
        **llama.GGUF.names,
        "block/attention/q_norm": ("blk.{i}.attn_q_norm.weight",),
        "block/attention/k_norm": ("blk.{i}.attn_k_norm.weight",),
        "block/attention_post_norm": ("blk.{i}.post_attention_norm.weight",),
        "block/mlp_post_norm": ("blk.{i}.post_ffw_norm.weight",),
    }
)


def gemma3_from_hf(fields: Fields) -> ModelConfig:
    """Gemma3ForCausalLM (`gemma3_text`)."""
    fields.expect("hidden_activation", "gelu_pytorch_tanh")
    fields.expect("use_bidirectional_attention", False)
    fields.expect("attn_logit_softcapping", None)  # a field that transformers reads and never applies
    fields = Fields(
        {**fields.raw, "max_position_embeddings": fields.whole("max_position_embeddings", _CONTEXT)}, fields.where
    )
    width, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers", high=MAX_LAYERS)
    heads, head_dim = fields.whole("num_attention_heads"), fields.whole("head_dim", 256)
    rope, local_rope = _ropes_from_hf(fields, head_dim)
    bias = fields.flag("attention_bias", False)
    return ModelConfig(
        family="gemma3",
        vocab_size=fields.whole("vocab_size"),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", 4),
        head_dim=head_dim,
        mlp_width=fields.whole("intermediate_size"),
        context=fields.whole("max_position_embeddings"),
        query_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        windows=_windows_from_hf(fields, layers),
        activation="gelu_tanh",
        tied_head=fields.flag("tie_word_embeddings", True),
        qk_norm="head",
        post_norms=True,
        attention_bias=bias,
        output_bias=bias,
        embedding_scale=width**0.5,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def _windows_from_hf(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """By `layer_types`, or by the older `sliding_window_pattern`: every sixth layer sees everything."""
    window = fields.whole("sliding_window", 4096)
    types = fields.get("layer_types")
    if types is None:
        return _every(fields.whole("sliding_window_pattern", _PATTERN), window, layers)
    kinds = {"sliding_attention": window, "full_attention": None}
    if not isinstance(types, list) or len(types) != layers or not all(kind in list(kinds) for kind in types):
        raise ConfigError(f"layer_types is {types!r:.80}; expected {layers} times one of {', '.join(kinds)}")
    return tuple(kinds[kind] for kind in types)


def _every(pattern: int, window: int, layers: int) -> tuple[int | None, ...]:
    return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(layers))


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
    width, layers = fields.whole("gemma3.embedding_length"), fields.whole("gemma3.block_count", high=MAX_LAYERS)
    heads, head_dim = fields.whole("gemma3.attention.head_count"), fields.whole("gemma3.attention.key_length", 256)
    fields.expect("gemma3.attention.value_length", head_dim)
    fields.expect("gemma3.attn_logit_softcapping", None)
    # The 27B model alone scales by width / heads (168) instead of head_dim (128); no field says so.
    scalar = width / heads if layers == _LAYERS_27B else head_dim
    pattern = fields.whole("gemma3.attention.sliding_window_pattern", _PATTERN)
    return ModelConfig(
        family="gemma3",
        vocab_size=shapes["token_embd.weight"][0],
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=fields.whole("gemma3.attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_width=fields.whole("gemma3.feed_forward_length"),
        context=fields.whole("gemma3.context_length"),
        query_scale=scalar**-0.5,
        norm_eps=fields.number("gemma3.attention.layer_norm_rms_epsilon"),
        rope=rope_from_gguf(fields, shapes, "gemma3", head_dim, theta=_GLOBAL_THETA),
        local_rope=RopeConfig(theta=fields.number("gemma3.rope.freq_base_swa", _LOCAL_THETA)),
        windows=_every(pattern, fields.whole("gemma3.attention.sliding_window"), layers),
        activation="gelu_tanh",
        tied_head="output.weight" not in shapes,
        qk_norm="head",
        post_norms=True,
        embedding_scale=width**0.5,
        logit_softcap=fields.optional_number("gemma3.final_logit_softcapping"),
    )
