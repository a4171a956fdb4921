"""Qwen 2 and 2.5, Qwen 3, and Qwen 3 with a mixture of experts.

Sources: arXiv 2407.10671 and 2505.09388; transformers' Qwen2Config, Qwen3Config and Qwen3MoeConfig; llama.cpp's
`qwen2`, `qwen3` and `qwen3moe`.
"""

from jaxinfer.config import ExpertsConfig, ModelConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families import llama
from jaxinfer.model.families.experts import GGUF_EXPERTS, active_weights_scale, experts_count
from jaxinfer.model.families.fields import MAX_LAYERS, Fields
from jaxinfer.model.families.leaves import Naming
from jaxinfer.model.families.sizes import Shapes, Windows, everywhere, windows_by_type

HF3 = Naming(
    {
        **llama.HF.names,
        "block/attention/q_norm": ("model.layers.{i}.self_attn.q_norm.weight",),
        "block/attention/k_norm": ("model.layers.{i}.self_attn.k_norm.weight",),
    }
)
GGUF3 = Naming(
    {
        **llama.GGUF.names,
        "block/attention/q_norm": ("blk.{i}.attn_q_norm.weight",),
        "block/attention/k_norm": ("blk.{i}.attn_k_norm.weight",),
    }
)
HF3_MOE = Naming(
    {
        **HF3.names,
        "block/experts/router": ("model.layers.{i}.mlp.gate.weight",),
        "block/experts/gate_up": (
            "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
            "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
        ),
        "block/experts/down": ("model.layers.{i}.mlp.experts.{e}.down_proj.weight",),
    }
)
GGUF3_MOE = Naming({**GGUF3.names, **GGUF_EXPERTS})

_WINDOW = {"sliding_window": 4096, "use_sliding_window": False}
_DEFAULTS_2 = {**_WINDOW, "num_key_value_heads": 32, "max_window_layers": 28, "max_position_embeddings": 32_768}
_DEFAULTS_3 = {**_DEFAULTS_2, "head_dim": 128}
_DEFAULTS_3_MOE = {
    **_WINDOW,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}


def qwen2_from_hf(fields: Fields) -> ModelConfig:
    """Qwen2ForCausalLM: biases on q, k and v alone, whatever the file says."""
    fields = fields.with_defaults(_DEFAULTS_2)
    fields.flag("attention_bias", True)  # which transformers does not read either
    fields.expect("mlp_bias", False)
    return llama.dense_from_hf(fields, "qwen2", windows=_windows(fields), attention_bias=True, output_bias=False)


def qwen3_from_hf(fields: Fields) -> ModelConfig:
    """Qwen3ForCausalLM."""
    fields = fields.with_defaults(_DEFAULTS_3)
    fields.expect("mlp_bias", False)
    return llama.dense_from_hf(fields, "qwen3", windows=_windows(fields), qk_norm="head")


def _windows(fields: Fields) -> Windows:
    """`sliding_window` counts with `use_sliding_window` alone: by `layer_types`, or from `max_window_layers` on."""
    layers, window = fields.whole("num_hidden_layers", high=MAX_LAYERS), _window(fields)
    first = fields.whole("max_window_layers", low=0)
    by_type = windows_by_type(fields, layers, window)
    if by_type is not None or window is None or first >= layers:
        return by_type or ()
    return tuple(window if layer >= first else None for layer in range(layers))


def _window(fields: Fields) -> int | None:
    wanted, given = fields.flag("use_sliding_window", False), fields.get("sliding_window") is not None
    return fields.whole("sliding_window") if wanted and given else None


def qwen3_moe_from_hf(fields: Fields) -> ModelConfig:
    """Qwen3MoeForCausalLM: a window holds on every layer; some layers may have an MLP in place of experts."""
    fields = fields.with_defaults(_DEFAULTS_3_MOE)
    fields.expect("mlp_bias", False)
    layers, window = fields.whole("num_hidden_layers", high=MAX_LAYERS), _window(fields)
    fields.get("max_window_layers")  # which this family has no use for
    fields.expect("use_qk_norm", True)
    experts = ExpertsConfig(
        count=experts_count(fields, "num_experts", "num_local_experts"),
        active=fields.whole("num_experts_per_tok"),
        width=fields.whole("moe_intermediate_size"),
        normalised=fields.flag("norm_topk_prob", False),
    )
    return llama.dense_from_hf(
        fields,
        "qwen3_moe",
        qk_norm="head",
        windows=everywhere(window, layers),
        experts=experts,
        dense_layers=_dense_layers(fields, layers),
    )


def _dense_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """The layers that `mlp_only_layers` lists, and those that are no `decoder_sparse_step`-th."""
    step, listed = fields.whole("decoder_sparse_step"), fields.get("mlp_only_layers", [])
    if not isinstance(listed, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        raise ConfigError(f"{fields.where}: mlp_only_layers is {listed!r:.80}; expected a list of layer numbers")
    dense = set(listed)
    return tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step)


def qwen2_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `qwen2`, which has no windows: its converter drops them."""
    return llama.dense_from_gguf(fields, shapes, "qwen2", "qwen2")


def qwen3_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `qwen3`."""
    return llama.dense_from_gguf(fields, shapes, "qwen3", "qwen3", qk_norm="head")


def qwen3_moe_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `qwen3moe`: experts on every layer, weights always divided by their sum."""
    fields.expect("qwen3moe.expert_weights_norm", True)
    active = fields.whole("qwen3moe.expert_used_count")
    width = fields.whole("qwen3moe.feed_forward_length") // active
    experts = ExpertsConfig(
        count=fields.whole("qwen3moe.expert_count"),
        active=active,
        width=fields.whole("qwen3moe.expert_feed_forward_length", width),
        scale=active_weights_scale(fields, "qwen3moe"),
    )
    return llama.dense_from_gguf(fields, shapes, "qwen3moe", "qwen3_moe", qk_norm="head", experts=experts)
