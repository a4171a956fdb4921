"""Grouped-query attention over the page pool (arXiv 2305.13245).

Knows: projections, biases, norms of queries and keys, rotary embedding, and which window and softcap a layer has.
Knows nothing of how pages are laid out, read or written: `Ops` does that.
"""

from typing import Any, cast

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array

from jaxinfer.arrays import Hidden, Keys, Pages, Queries, RowInt, Values
from jaxinfer.config import ModelConfig
from jaxinfer.model.layers import norm_weight, rms_norm, weight
from jaxinfer.model.ops import Ops, TokenBatch, pick
from jaxinfer.model.rope import Phases, rotate


class Attention(nn.Module):
    """One layer's attention; `window` counts the keys a query sees, itself included, None for all."""

    config: ModelConfig
    dtype: Any
    window: int | None

    @nn.compact
    def __call__(
        self, x: Hidden, pages: Pages, batch: TokenBatch, phases: Phases, ops: Ops, last: RowInt | None
    ) -> tuple[Hidden, Pages]:
        """Attention's addition to the residual stream, and the pages with this step's keys. DONATES pages.

        With `last`, the addition of each row's token at that index alone: [s, 1, w].
        """
        config = self.config
        queries, keys, values = self._project(x, ops)
        pages = ops.write(pages, rotate(keys, phases), values, batch)
        if last is not None:
            queries, batch = pick(queries, last), batch.only(last)
            phases = pick(phases[0], last), pick(phases[1], last)
        mixed = ops.attend(
            rotate(queries, phases),
            pages,
            batch,
            window=self.window,
            scale=config.query_scale,
            softcap=config.attention_softcap,
        )
        shape = (config.width, config.kv_heads, config.group, config.head_dim)
        out = weight(self, "out", ("width", "kv_heads", "group", "head"), shape, self.dtype)
        added = ops.matmul(mixed, out, axes=3)
        if config.output_bias:
            init = nn.with_logical_partitioning(nn.initializers.zeros, ("width",))
            added = added + cast(Array, self.param("out_bias", init, (config.width,), self.dtype))
        return added, pages

    def _project(self, x: Hidden, ops: Ops) -> tuple[Queries, Keys, Values]:
        """Queries, keys and values from one matrix, so x is read once; each kv head holds its g queries, key, value."""
        config = self.config
        axes, shape = ("kv_heads", "group", "head"), (config.kv_heads, config.group + 2, config.head_dim)
        qkv = ops.matmul(x, weight(self, "qkv", (*axes, "width"), (*shape, config.width), self.dtype))
        if config.attention_bias:
            init = nn.with_logical_partitioning(nn.initializers.zeros, axes)
            qkv = qkv + cast(Array, self.param("qkv_bias", init, shape, self.dtype))
        queries, keys, values = jnp.split(qkv, [config.group, config.group + 1], axis=3)
        keys, values = keys.squeeze(3), values.squeeze(3)
        if config.qk_norm:
            queries = rms_norm(queries, norm_weight(self, "q_norm", "head", config.head_dim), config.norm_eps)
            keys = rms_norm(keys, norm_weight(self, "k_norm", "head", config.head_dim), config.norm_eps)
        return queries, keys, values
