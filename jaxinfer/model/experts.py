"""A mixture of experts in place of the MLP (arXiv 2101.03961): every token passes the few experts its router chooses.

Knows: routing, and the order that brings each expert's tokens together. No token is dropped and no expert has a
capacity: tokens are sorted by expert and multiplied group by group, so that the engine reads and multiplies by the
chosen experts alone. Router and mixing are float32 on every platform: a float32 product is bfloat16 on TPU and TF32 on
GPU unless the highest precision is asked for.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Float32, Int32

from jaxinfer.arrays import Hidden
from jaxinfer.config import ExpertsConfig, ModelConfig
from jaxinfer.model.layers import ACTIVATIONS, MLP, bias, weight
from jaxinfer.model.ops import HIGHEST, Ops


class Experts(nn.Module):
    """One layer's experts, and the shared MLP beside them where there is one."""

    config: ModelConfig
    experts: ExpertsConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: Hidden, ops: Ops) -> Hidden:
        """The experts' addition to the residual stream, weighed and summed in float32."""
        flat, active = x.reshape(-1, x.shape[-1]), self.experts.active
        weights, chosen = self._route(flat)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        owner = chosen.reshape(-1)[order]
        sizes = jnp.bincount(owner, length=self.experts.count)
        results = self._run(flat[order // active], owner, sizes, ops)
        back = results[jnp.argsort(order)].reshape(-1, active, x.shape[-1])  # to each token, in order of choice
        mixed = jnp.einsum("naw,na->nw", back.astype(jnp.float32), weights, precision=HIGHEST)
        added = mixed.astype(x.dtype).reshape(x.shape)
        if not self.experts.shared_width:
            return added
        return added + MLP(self.config, self.dtype, self.experts.shared_width, name="shared")(x, ops)

    def _route(self, x: Float[Array, "n w"]) -> tuple[Float32[Array, "n a"], Int32[Array, "n a"]]:
        """Each token's experts and their weights; scores are float32, as a rounded one may choose another expert."""
        experts = self.experts
        router = weight(self, "router", ("experts", "width"), (experts.count, x.shape[-1]), jnp.float32)
        logits = jnp.einsum("nw,ew->ne", x.astype(jnp.float32), router, precision=HIGHEST)
        if experts.router_bias:
            logits = logits + bias(self, "router_bias", ("experts",), (experts.count,), jnp.float32)
        scores = jax.nn.softmax(logits) if experts.scoring == "softmax" else jax.nn.sigmoid(logits)
        ranked = scores
        if experts.selection_bias:
            ranked = scores + bias(self, "selection_bias", ("experts",), (experts.count,), jnp.float32)
        chosen = jax.lax.top_k(_within_best_groups(ranked, experts), experts.active)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        if experts.normalised:
            weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
        return weights * experts.scale, chosen

    def _run(
        self, x: Float[Array, "n w"], owner: Int32[Array, " n"], sizes: Int32[Array, " e"], ops: Ops
    ) -> Float[Array, "n w"]:
        """Each row through the MLP of its owner; rows lie in order of their owners, `sizes` counts each one's."""
        (count, inner), width = (self.experts.count, self.experts.width), x.shape[-1]
        axes = ("experts", "gate_up", "mlp", "width")
        both = ops.grouped_matmul(x, weight(self, "gate_up", axes, (count, 2, inner, width), self.dtype), sizes)
        if self.config.mlp_bias:
            both = both + bias(self, "gate_up_bias", axes[:3], (count, 2, inner), self.dtype)[owner]
        hidden = ACTIVATIONS[self.config.activation](both[:, 0], both[:, 1])
        down = weight(self, "down", ("experts", "width", "mlp"), (count, width, inner), self.dtype)
        added = ops.grouped_matmul(hidden, down, sizes)
        if self.config.mlp_bias:
            added = added + bias(self, "down_bias", ("experts", "width"), (count, width), self.dtype)[owner]
        return added


def _within_best_groups(ranked: Float32[Array, "n e"], experts: ExpertsConfig) -> Float32[Array, "n e"]:
    """The scores of each token's best groups, -inf elsewhere; a group ranks by the sum of its two best."""
    if experts.groups == experts.active_groups:
        return ranked
    grouped = ranked.reshape(len(ranked), experts.groups, -1)
    best = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
    kept = jax.nn.one_hot(jax.lax.top_k(best, experts.active_groups)[1], experts.groups, dtype=bool).any(axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)
