"""Grouped-query attention over the page pool (arXiv 2305.13245).

Knows: projections, biases, norms of queries and keys, rotary embedding, sinks, and which window and softcap a layer
has. Knows nothing of how pages are laid out, read or written: `Ops` does that.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from jaxinfer.arrays import Hidden, Keys, Pages, Queries, RowInt, Values
from jaxinfer.config import ModelConfig
from jaxinfer.model.layers import bias, norm_weight, rms_norm, weight
from jaxinfer.model.ops import Ops, TokenBatch, pick
from jaxinfer.model.rope import Phases, rotate


class Attention(nn.Module):
    """One layer's attention; `window` counts the keys a query sees, itself included, None for all."""

    config: ModelConfig
    dtype: Any
    window: int | None

    @nn.compact
    def __call__(
        self, x: Hidden, pages: Pages, batch: TokenBatch, phases: Phases | None, ops: Ops, last: RowInt | None
    ) -> tuple[Hidden, Pages]:
        """Attention's addition to the residual stream, and the pages with this step's keys. DONATES pages.

        With `last`, the addition of each row's token at that index alone: [s, 1, w]. Without `phases` nothing turns.
        """
        config = self.config
        queries, keys, values = self._project(x, ops)
        pages = ops.write(pages, keys if phases is None else rotate(keys, phases), values, batch)
        if last is not None:
            queries, batch = pick(queries, last), batch.only(last)
            phases = pick_phases(phases, last)
        mixed = ops.attend(
            queries if phases is None else rotate(queries, phases),
            pages,
            batch,
            window=self.window,
            scale=config.query_scale,
            softcap=config.attention_softcap,
            sinks=self._sinks(),
        )
        shape = (config.width, config.kv_heads, config.group, config.head_dim)
        added = ops.matmul(
            mixed, weight(self, "out", ("width", "kv_heads", "group", "head"), shape, self.dtype), axes=3
        )
        if config.output_bias:
            added = added + bias(self, "out_bias", ("width",), (config.width,), self.dtype)
        return added, pages

    def _project(self, x: Hidden, ops: Ops) -> tuple[Queries, Keys, Values]:
        """Queries, keys and values from one matrix, so x is read once; each kv head holds its g queries, key, value."""
        config = self.config
        axes, shape = ("kv_heads", "group", "head"), (config.kv_heads, config.group + 2, config.head_dim)
        qkv = ops.matmul(x, weight(self, "qkv", (*axes, "width"), (*shape, config.width), self.dtype))
        if config.attention_bias:
            qkv = qkv + bias(self, "qkv_bias", axes, shape, self.dtype)
        queries, keys, values = jnp.split(qkv, [config.group, config.group + 1], axis=3)
        keys, values = keys.squeeze(3), values.squeeze(3)
        return (*self._norm(queries, keys), values)

    def _norm(self, queries: Queries, keys: Keys) -> tuple[Queries, Keys]:
        config, head = self.config, self.config.head_dim
        if config.qk_norm is None:
            return queries, keys
        axes, wide, narrow = ("head",), (head,), (head,)
        if config.qk_norm == "all":
            axes, wide = ("kv_heads", "group", "head"), (config.kv_heads, config.group, head)
            narrow = (config.kv_heads, head)
        q_norm = norm_weight(self, "q_norm", axes, wide)
        k_norm = norm_weight(self, "k_norm", axes[:1] + axes[2:], narrow)
        return rms_norm(queries, q_norm, config.norm_eps), rms_norm(keys, k_norm, config.norm_eps)

    def _sinks(self) -> Any:
        if not self.config.sinks:
            return None
        return bias(self, "sinks", ("kv_heads", "group"), (self.config.kv_heads, self.config.group), jnp.float32)


def pick_phases(phases: Phases | None, last: RowInt) -> Phases | None:
    """The phases of each row's token at `last` alone."""
    return None if phases is None else (pick(phases[0], last), pick(phases[1], last))
