"""DeepSeek V3 and R1, and what has their shape: latent attention, a dense start, routed and shared experts.

Sources: arXiv 2412.19437; transformers' DeepseekV3Config; llama.cpp's `deepseek2`.
"""

from functools import partial

from jaxinfer.config import ExpertsConfig, LatentConfig, ModelConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families import llama
from jaxinfer.model.families.experts import GGUF_EXPERTS, SIGMOID, active_weights_scale, experts_count
from jaxinfer.model.families.fields import Fields
from jaxinfer.model.families.gguf_ropes import rope_from_gguf
from jaxinfer.model.families.leaves import Leaf, Naming, Source, Want, half_of_heads, rope_rows_paired
from jaxinfer.model.families.ropes import rope_from_hf, stretched_context, yarn_growth, yarn_scale
from jaxinfer.model.families.sizes import Shapes, plain_sizes_from_gguf, sizes_from_hf

_ATTENTION, _MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"
_PAIRED = {f"block/attention/{name}": rope_rows_paired for name in ("query", "q_up", "kv_down")}
HF = Naming(
    {
        **{path: names for path, names in llama.HF.names.items() if "qkv" not in path},
        "block/attention/q_down": (f"{_ATTENTION}.q_a_proj.weight",),
        "block/attention/q_norm": (f"{_ATTENTION}.q_a_layernorm.weight",),
        "block/attention/q_up": (f"{_ATTENTION}.q_b_proj.weight",),
        "block/attention/query": (f"{_ATTENTION}.q_proj.weight",),
        "block/attention/kv_down": (f"{_ATTENTION}.kv_a_proj_with_mqa.weight",),
        "block/attention/kv_norm": (f"{_ATTENTION}.kv_a_layernorm.weight",),
        "block/attention/key_up": (f"{_ATTENTION}.kv_b_proj.weight",),
        "block/attention/value_up": (f"{_ATTENTION}.kv_b_proj.weight",),
        "block/experts/router": (f"{_MLP}.gate.weight",),
        "block/experts/selection_bias": (f"{_MLP}.gate.e_score_correction_bias",),
        "block/experts/gate_up": (f"{_MLP}.experts.{{e}}.gate_proj.weight", f"{_MLP}.experts.{{e}}.up_proj.weight"),
        "block/experts/down": (f"{_MLP}.experts.{{e}}.down_proj.weight",),
        "block/experts/shared/gate_up": (
            f"{_MLP}.shared_experts.gate_proj.weight",
            f"{_MLP}.shared_experts.up_proj.weight",
        ),
        "block/experts/shared/down": (f"{_MLP}.shared_experts.down_proj.weight",),
    },
    {**_PAIRED, "block/attention/key_up": half_of_heads, "block/attention/value_up": half_of_heads},
    drafting="model.layers.{i}.eh_proj.weight",
)


def _rank_first(want: Want) -> Leaf:
    """key_up [h, c, r] out of [h, r, c]."""
    heads, content, rank = want.shape
    source = Source(want.names[0], (heads, rank, content), want.shape, order=(0, 2, 1))
    return Leaf(want.path, want.shape, (source,))


GGUF = Naming(
    {
        **{path: names for path, names in llama.GGUF.names.items() if "qkv" not in path},
        **GGUF_EXPERTS,
        "block/attention/q_down": ("blk.{i}.attn_q_a.weight",),
        "block/attention/q_norm": ("blk.{i}.attn_q_a_norm.weight",),
        "block/attention/q_up": ("blk.{i}.attn_q_b.weight",),
        "block/attention/query": ("blk.{i}.attn_q.weight",),
        "block/attention/kv_down": ("blk.{i}.attn_kv_a_mqa.weight",),
        "block/attention/kv_norm": ("blk.{i}.attn_kv_a_norm.weight",),
        "block/attention/key_up": ("blk.{i}.attn_k_b.weight",),
        "block/attention/value_up": ("blk.{i}.attn_v_b.weight",),
        "block/experts/selection_bias": ("blk.{i}.exp_probs_b.bias",),
        "block/experts/shared/gate_up": ("blk.{i}.ffn_gate_shexp.weight", "blk.{i}.ffn_up_shexp.weight"),
        "block/experts/shared/down": ("blk.{i}.ffn_down_shexp.weight",),
    },
    {**_PAIRED, "block/attention/key_up": _rank_first},
)

_DEFAULTS = {
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
}
_IMPLEMENTED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
"""Fields that only V3's own value is implemented of."""


def deepseek_v3_from_hf(fields: Fields) -> ModelConfig:
    """DeepseekV3ForCausalLM. Layers that only draft tokens (`num_nextn_predict_layers`) are stored and not read.

    The latents' norms have the epsilon that LatentConfig has, whatever `rms_norm_eps` says.
    """
    fields = fields.with_defaults(_DEFAULTS)
    for name, value in _IMPLEMENTED.items():
        fields.expect(name, value)
    sizes, latent = sizes_from_hf(fields), _latent_from_hf(fields)
    fields.expect("num_key_value_heads", sizes["heads"])
    rope = rope_from_hf(fields, latent.rope_dim)
    head_dim = latent.content_dim + latent.rope_dim
    row = {
        **sizes,
        "head_dim": head_dim,
        "context": stretched_context(rope, sizes["context"]),
        "query_scale": head_dim**-0.5 * yarn_growth(fields, rope),
        "rope": rope,
        "latent": latent,
        "experts": _experts_from_hf(fields),
        "dense_layers": _first(fields.whole("first_k_dense_replace", low=0), sizes["layers"]),
    }
    return ModelConfig(family="deepseek_v3", **row)


def _first(dense: int, layers: int) -> tuple[int, ...]:
    return tuple(range(min(dense, layers)))


def _latent_from_hf(fields: Fields) -> LatentConfig:
    return LatentConfig(
        rank=fields.whole("kv_lora_rank"),
        rope_dim=fields.whole("qk_rope_head_dim"),
        content_dim=fields.whole("qk_nope_head_dim"),
        value_dim=fields.whole("v_head_dim"),
        query_rank=None if fields.get("q_lora_rank") is None else fields.whole("q_lora_rank"),
    )


def _experts_from_hf(fields: Fields) -> ExpertsConfig:
    inner = fields.whole("moe_intermediate_size")
    return ExpertsConfig(
        count=experts_count(fields, "n_routed_experts", "num_local_experts"),
        active=fields.whole("num_experts_per_tok"),
        width=inner,
        scoring="sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor"),
        groups=fields.whole("n_group"),
        active_groups=fields.whole("topk_group"),
        selection_bias=True,
        shared_width=inner * fields.whole("n_shared_experts", low=0),
    )


def deepseek_v3_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `deepseek2`, of what has V3's shape: DeepSeek V2, whose experts are scored otherwise, is refused.

    Refused too: files of before latent attention was split into heads, which have `attn_kv_b`.
    """
    field = partial("deepseek2.{}".format)
    fields.expect(field("nextn_predict_layers"), 0)
    fields.expect(field("rope.scaling.attn_factor"), None, 1.0)
    sizes, latent = plain_sizes_from_gguf(fields, shapes, "deepseek2"), _latent_from_gguf(fields)
    dense = _first(fields.whole(field("leading_dense_block_count"), 0, low=0), sizes["layers"])
    mscale = _mscale_all_dim(fields)
    rope = rope_from_gguf(fields, shapes, "deepseek2", latent.rope_dim, mscale_all_dim=mscale)
    head_dim = latent.content_dim + latent.rope_dim
    row = {
        **sizes,
        "kv_heads": sizes["heads"],
        "head_dim": head_dim,
        "context": stretched_context(rope, sizes["context"]),
        "query_scale": head_dim**-0.5 * yarn_scale(rope.factor, mscale or 0.0) ** 2,
        "rope": rope,
        "latent": latent,
        "experts": _experts_from_gguf(fields, f"blk.{len(dense)}.exp_probs_b.bias" in shapes),
        "dense_layers": dense,
    }
    return ModelConfig(family="deepseek_v3", **row)


def _mscale_all_dim(fields: Fields) -> float | None:
    """llama.cpp keeps a tenth of it; without it, it would scale the scores as no model was trained with."""
    name = "deepseek2.rope.scaling.yarn_log_multiplier"
    if fields.get("deepseek2.rope.scaling.type") != "yarn":
        fields.expect(name, None, 0.0)
        return None
    return 10 * fields.number(name)


def _latent_from_gguf(fields: Fields) -> LatentConfig:
    """The file describes the attention as it runs, over one key of all heads, and the heads' own sizes as `_mla`."""
    field = partial("deepseek2.attention.{}".format)
    rank, rope_dim = fields.whole(field("kv_lora_rank")), fields.whole("deepseek2.rope.dimension_count")
    fields.expect(field("head_count_kv"), 1)
    fields.expect(field("key_length"), rank + rope_dim)
    fields.expect(field("value_length"), rank)
    whole = fields.whole(field("key_length_mla"), low=rope_dim + 1)
    rank_of_queries = field("q_lora_rank")
    return LatentConfig(
        rank=rank,
        rope_dim=rope_dim,
        content_dim=whole - rope_dim,
        value_dim=fields.whole(field("value_length_mla")),
        query_rank=None if fields.get(rank_of_queries) is None else fields.whole(rank_of_queries),
    )


def _experts_from_gguf(fields: Fields, biased: bool) -> ExpertsConfig:
    field = partial("deepseek2.{}".format)
    scoring = fields.get(field("expert_gating_func"))
    if scoring != SIGMOID:
        raise ConfigError(
            f"{fields.where}: {field('expert_gating_func')} is {scoring!r:.80}; expected {SIGMOID}, DeepSeek V3's "
            "sigmoid: nothing else is implemented"
        )
    inner = fields.whole(field("expert_feed_forward_length"))
    return ExpertsConfig(
        count=fields.whole(field("expert_count")),
        active=fields.whole(field("expert_used_count")),
        width=inner,
        scoring="sigmoid",
        normalised=fields.flag(field("expert_weights_norm"), False),
        scale=active_weights_scale(fields, "deepseek2"),
        # A file without these is of a converter that dropped them, and V3's choice of experts with them.
        groups=fields.whole(field("expert_group_count")),
        active_groups=fields.whole(field("expert_group_used_count")),
        selection_bias=biased,
        shared_width=inner * fields.whole(field("expert_shared_count"), 0, low=0),
    )
