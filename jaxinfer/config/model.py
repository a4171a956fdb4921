"""The model: every switch that the decoder's arithmetic depends on."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from jaxinfer.config.checks import (
    require,
    require_flag,
    require_layers,
    require_number,
    require_whole,
)
from jaxinfer.config.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh", "gelu", "swiglu_clamped"]
"""What becomes of gate and up: act(gate) * up; swiglu_clamped is gpt-oss's own."""
QKNorm = Literal["head", "all"]
"""Queries and keys are normed head by head, or all heads of a token together."""
Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP: each token goes to `active` of `count` MLPs of `width`.

    scoring turns the router's logits into weights; normalised divides a token's weights by their sum, then `scale`
    multiplies them. selection_bias: a stored bias per expert that counts in choosing, not in weighing; the choice is
    among `active_groups` of `groups` equal groups, ranked by the sum of their two best (arXiv 2412.19437).
    router_bias: the router's logits have a bias. shared_width: of an MLP beside the experts that every token passes; 0
    for none.
    """

    count: int
    active: int
    width: int
    scoring: Scoring = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    active_groups: int = 1
    selection_bias: bool = False
    router_bias: bool = False
    shared_width: int = 0

    def __post_init__(self) -> None:
        require_whole(self, "count", "active", "width", "groups", "active_groups")
        require_whole(self, "shared_width", low=0)
        require_number(self, "scale")
        require_flag(self, "normalised", "selection_bias", "router_bias")
        require(
            self.scoring in get_args(Scoring), f"scoring is {self.scoring!r:.80}; expected one of {get_args(Scoring)}"
        )
        require(self.count % self.groups == 0, f"experts {self.count} is no multiple of their groups {self.groups}")
        require(
            self.active_groups <= self.groups,
            f"active_groups {self.active_groups} is above groups {self.groups}",
        )
        reachable = self.count // self.groups * self.active_groups
        require(self.active <= reachable, f"active experts {self.active} is above the {reachable} to choose from")


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (arXiv 2405.04434): keys and values of all heads come out of one cached latent.

    rank: of the latent. rope_dim: features of the one key beside it that turns, shared by all heads. content_dim and
    value_dim: features of a head's key out of the latent, and of its value. query_rank: of the queries' own latent,
    None where they come straight from the stream. norm_eps: of the latents' norms, which is not the other norms'.
    """

    rank: int
    rope_dim: int
    content_dim: int
    value_dim: int
    query_rank: int | None = None
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_whole(self, "rank", "rope_dim", "content_dim", "value_dim")
        require_whole(self, *(("query_rank",) if self.query_rank is not None else ()))
        require_number(self, "norm_eps")
        require(self.rope_dim % 2 == 0, f"rope_dim is {self.rope_dim}; rotary embedding needs it even")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder's arithmetic depends on; a model family is a row of these switches.

    context: most tokens of a sequence. windows: per layer, how many keys a query sees, itself included; None sees all.
    local_rope serves the layers with a window where it is given; layers in no_rope turn nothing. attention_bias adds a
    bias to q, k and v, output_bias one to the attention's output projection, mlp_bias one to each matrix of an MLP or
    expert. pre_norms norm what attention and MLP read, post_norms what they add. residual_scale multiplies what is
    added. query_scale multiplies q.k. sinks: a logit per head that takes its share of the softmax and adds nothing.
    logit_scale multiplies the logits. Norm weights are stored ready to multiply: a family that stores w - 1 is folded
    at load. experts take the MLP's place except in dense_layers. With latent, head_dim is content_dim + rope_dim.
    """

    family: str
    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    context: int
    query_scale: float
    norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None
    no_rope: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()
    activation: Activation = "silu"
    tied_head: bool = False
    qk_norm: QKNorm | None = None
    pre_norms: bool = True
    post_norms: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sinks: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    experts: ExpertsConfig | None = None
    dense_layers: tuple[int, ...] = ()
    latent: LatentConfig | None = None

    def __post_init__(self) -> None:
        require_whole(self, "vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width", "context")
        require(self.heads % self.kv_heads == 0, f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        require(
            self.head_dim % 2 == 0 and self.head_dim <= 2**16,  # its frequencies are made while the model is traced
            f"head_dim is {self.head_dim}; rotary embedding needs it even, and 65536 at the most",
        )
        require(
            len(self.windows) in (0, self.layers),
            f"windows has {len(self.windows)} entries; expected one per layer, {self.layers}",
        )
        for window in self.windows:
            require(
                window is None or (isinstance(window, int) and window > 0),
                f"windows holds {window!r:.80}; expected positive whole numbers, or None for a layer that sees all",
            )
        self._check_switches()
        self._check_parts()

    def _check_switches(self) -> None:
        require(isinstance(self.family, str), f"family is {self.family!r:.80}; expected a name")
        require(self.activation in get_args(Activation), f"activation is {self.activation!r:.80}; not one we know")
        require(
            self.qk_norm in (None, *get_args(QKNorm)), f"qk_norm is {self.qk_norm!r:.80}; expected head, all or null"
        )
        require_number(self, "query_scale", "norm_eps", "embedding_scale", "residual_scale", "logit_scale")
        require_number(self, *(n for n in ("attention_softcap", "logit_softcap") if getattr(self, n) is not None))
        require_flag(self, "tied_head", "pre_norms", "post_norms", "attention_bias", "output_bias", "mlp_bias", "sinks")
        require(self.pre_norms or self.post_norms, "pre_norms and post_norms are both off; expected one of them")

    def _check_parts(self) -> None:
        require(isinstance(self.rope, RopeConfig), f"rope is {self.rope!r:.80}; expected a RopeConfig")
        require(isinstance(self.local_rope, RopeConfig | None), f"local_rope is {self.local_rope!r:.80}")
        require_layers(self, "no_rope", "dense_layers")
        require(isinstance(self.experts, ExpertsConfig | None), f"experts is {self.experts!r:.80}")
        require(isinstance(self.latent, LatentConfig | None), f"latent is {self.latent!r:.80}")
        require(self.experts is not None or not self.dense_layers, "dense_layers are given for a model without experts")
        for rope in filter(None, (self.rope, self.local_rope)):
            self._check_rope(rope)
        if self.latent is not None:
            self._check_latent(self.latent)

    def _check_rope(self, rope: RopeConfig) -> None:
        size = self.latent.rope_dim if self.latent else self.head_dim
        require(rope.turning(size) <= size, f"rope dim is {rope.dim}, but a head has {size} features that may turn")
        pairs = rope.turning(size) // 2
        require(rope.kind != "dynamic" or pairs > 1, f"rope of kind dynamic stretches no head of {2 * pairs} features")
        require(
            len(rope.long_factors) in (0, pairs), f"rope has {len(rope.long_factors)} long_factors for {pairs} pairs"
        )

    def _check_latent(self, latent: LatentConfig) -> None:
        whole = latent.content_dim + latent.rope_dim
        require(self.head_dim == whole, f"head_dim is {self.head_dim}; expected content_dim + rope_dim, {whole}")
        require(self.kv_heads == self.heads, f"kv_heads is {self.kv_heads}; expected every head, {self.heads}")
        unfit = [name for name in ("qk_norm", "attention_bias", "output_bias", "sinks") if getattr(self, name)]
        require(not unfit, f"latent attention has no {' or '.join(unfit)}")

    @property
    def group(self) -> int:
        """Query heads that share one key and value head."""
        return self.heads // self.kv_heads

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """What the cache holds of a token in each layer, as (planes, heads, features).

        Two planes are keys and values. One plane, with latent attention, is a key whose first features are the value.
        """
        if self.latent is not None:
            return 1, 1, self.latent.rank + self.latent.rope_dim
        return 2, self.kv_heads, self.head_dim

    def window(self, layer: int) -> int | None:
        """Keys that a query of `layer` sees, itself included; None for all."""
        return self.windows[layer] if self.windows else None

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of `layer`; None where nothing turns."""
        if layer in self.no_rope:
            return None
        return self.local_rope if self.local_rope and self.window(layer) is not None else self.rope

    def layer_experts(self, layer: int) -> ExpertsConfig | None:
        """The experts of `layer`; None where it has one dense MLP."""
        return None if layer in self.dense_layers else self.experts
