"""gpt-oss: sinks, biases everywhere, experts with a clamped gate, windows on every other layer, yarn.

Sources: arXiv 2508.10925; transformers' GptOssConfig; llama.cpp's `gpt-oss`.
"""

from jaxinfer.config import ExpertsConfig, ModelConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families import llama
from jaxinfer.model.families.experts import GGUF_EXPERTS, active_weights_scale
from jaxinfer.model.families.fields import MAX_LAYERS, Fields
from jaxinfer.model.families.gguf_ropes import rope_from_gguf
from jaxinfer.model.families.leaves import Leaf, Naming, Source, Want
from jaxinfer.model.families.sizes import Shapes, Windows, every, windows_by_type
from jaxinfer.model.layers import CLAMP, SLOPE


def _gate_between_up(want: Want) -> Leaf:
    """gate_up [e, 2, f, w] out of [e, w, 2f], and its bias [e, 2, f] out of [e, 2f]: gate and up take turns."""
    count, halves, inner, *width = want.shape
    stored, last = (count, *width, halves * inner), len(want.shape) - 1
    order = (0, last, last - 1, *range(1, last - 1))
    source = Source(want.names[0], stored, want.shape, split=(count, *width, inner, halves), order=order)
    return Leaf(want.path, want.shape, (source,))


def _input_first(want: Want) -> Leaf:
    """down [e, w, f] out of [e, f, w]."""
    count, width, inner = want.shape
    source = Source(want.names[0], (count, inner, width), want.shape, order=(0, 2, 1))
    return Leaf(want.path, want.shape, (source,))


HF = Naming(
    {
        **llama.HF.names,
        "block/attention/sinks": ("model.layers.{i}.self_attn.sinks",),
        "block/experts/router": ("model.layers.{i}.mlp.router.weight",),
        "block/experts/router_bias": ("model.layers.{i}.mlp.router.bias",),
        "block/experts/gate_up": ("model.layers.{i}.mlp.experts.gate_up_proj",),
        "block/experts/gate_up_bias": ("model.layers.{i}.mlp.experts.gate_up_proj_bias",),
        "block/experts/down": ("model.layers.{i}.mlp.experts.down_proj",),
        "block/experts/down_bias": ("model.layers.{i}.mlp.experts.down_proj_bias",),
    },
    {
        "block/experts/gate_up": _gate_between_up,
        "block/experts/gate_up_bias": _gate_between_up,
        "block/experts/down": _input_first,
    },
)
GGUF = Naming(
    {
        **llama.GGUF.names,
        **GGUF_EXPERTS,
        "block/mlp_norm": ("blk.{i}.post_attention_norm.weight",),
        "block/attention/sinks": ("blk.{i}.attn_sinks.weight",),
        "block/experts/router_bias": ("blk.{i}.ffn_gate_inp.bias",),
        "block/experts/gate_up_bias": ("blk.{i}.ffn_gate_exps.bias", "blk.{i}.ffn_up_exps.bias"),
        "block/experts/down_bias": ("blk.{i}.ffn_down_exps.bias",),
    }
)

_THETA, _PATTERN = 150_000.0, 2
_SWITCHES = {"activation": "swiglu_clamped", "sinks": True, "mlp_bias": True}
_DEFAULTS = {
    "attention_bias": True,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}


def gpt_oss_from_hf(fields: Fields) -> ModelConfig:
    """GptOssForCausalLM; what rope it has must be said, for transformers 4 and 5 take different ones for none."""
    fields = fields.with_defaults(_DEFAULTS)
    fields.expect("swiglu_alpha", SLOPE)
    fields.expect("swiglu_limit", CLAMP)
    active = fields.whole("num_experts_per_tok")
    fields.expect("experts_per_token", active)
    if not fields.mapping("rope_parameters") and not fields.mapping("rope_scaling"):
        raise ConfigError(
            f"{fields.where}: rope_scaling is missing; expected an object that gpt-oss's rope is read from"
        )
    inner = fields.whole("intermediate_size")
    experts = ExpertsConfig(fields.whole("num_local_experts"), active, inner, router_bias=True)
    return llama.dense_from_hf(fields, "gpt_oss", theta=_THETA, windows=_windows(fields), experts=experts, **_SWITCHES)


def _windows(fields: Fields) -> Windows:
    layers = fields.whole("num_hidden_layers", high=MAX_LAYERS)
    window = fields.optional_whole("sliding_window")
    by_type = windows_by_type(fields, layers, window)
    if by_type is not None:
        return by_type
    return every(_PATTERN, fields.whole("sliding_window"), layers)


def gpt_oss_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `gpt-oss`; no field says that yarn's bounds are not rounded."""
    arch = "gpt-oss"
    layers, head_dim = (
        fields.whole(f"{arch}.block_count", high=MAX_LAYERS),
        fields.whole(f"{arch}.attention.key_length"),
    )
    experts = ExpertsConfig(
        count=fields.whole(f"{arch}.expert_count"),
        active=fields.whole(f"{arch}.expert_used_count"),
        width=fields.whole(f"{arch}.expert_feed_forward_length"),
        scale=active_weights_scale(fields, arch),
        router_bias=True,
    )
    pattern = fields.whole(f"{arch}.attention.sliding_window_pattern", _PATTERN)
    return llama.dense_from_gguf(
        fields,
        shapes,
        arch,
        "gpt_oss",
        rope=rope_from_gguf(fields, shapes, arch, head_dim, truncate=False),
        windows=every(pattern, fields.whole(f"{arch}.attention.sliding_window"), layers),
        experts=experts,
        **_SWITCHES,
    )
