"""Multi-head latent attention over the page pool (arXiv 2405.04434), in the form that never expands what is cached.

Knows: the latents, and that a head's key and value matrices can be applied to its query and its result instead of to
every cached token. So the cache holds one key of rank + rope_dim features a token, whose first `rank` are the value of
all heads. Knows nothing of how pages are laid out, read or written: `Ops` does that.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxinfer.arrays import Hidden, Keys, Pages, Queries, RowInt
from jaxinfer.config import LatentConfig, ModelConfig
from jaxinfer.model.attention import pick_phases
from jaxinfer.model.layers import norm_weight, rms_norm, weight
from jaxinfer.model.ops import HIGHEST, Ops, TokenBatch, pick
from jaxinfer.model.rope import Phases, rotate


class LatentAttention(nn.Module):
    """One layer's latent attention; `window` counts the keys a query sees, itself included, None for all."""

    config: ModelConfig
    latent: LatentConfig
    dtype: Any
    window: int | None

    @nn.compact
    def __call__(
        self, x: Hidden, pages: Pages, batch: TokenBatch, phases: Phases | None, ops: Ops, last: RowInt | None
    ) -> tuple[Hidden, Pages]:
        """As `Attention`: the addition to the residual stream, and the pages with this step's keys. DONATES pages."""
        config, latent = self.config, self.latent
        pages = ops.write(pages, self._keys(x, phases, ops), None, batch)
        if last is not None:
            x, batch, phases = pick(x, last), batch.only(last), pick_phases(phases, last)
        mixed = ops.attend(
            self._queries(x, phases, ops),
            pages,
            batch,
            window=self.window,
            scale=config.query_scale,
            softcap=config.attention_softcap,
        )
        axes, shape = ("heads", "head", "latent"), (config.heads, latent.value_dim, latent.rank)
        value_up = weight(self, "value_up", axes, shape, self.dtype)
        values = jnp.einsum("sthr,hvr->sthv", mixed[:, :, 0, :, : latent.rank], value_up, precision=HIGHEST)
        out = weight(self, "out", ("width", "heads", "head"), (config.width, *shape[:2]), self.dtype)
        return ops.matmul(values, out, axes=2), pages

    def _keys(self, x: Hidden, phases: Phases | None, ops: Ops) -> Keys:
        """What is cached of each token: its normed latent, then the key that turns; [s, t, 1, rank + rope_dim]."""
        latent = self.latent
        shape = (latent.rank + latent.rope_dim, self.config.width)
        both = ops.matmul(x, weight(self, "kv_down", ("latent", "width"), shape, self.dtype))[:, :, None]
        content, turning = jnp.split(both, [latent.rank], axis=-1)
        content = rms_norm(content, norm_weight(self, "kv_norm", ("latent",), (latent.rank,)), latent.norm_eps)
        return jnp.concatenate([content, turning if phases is None else rotate(turning, phases)], axis=-1)

    def _queries(self, x: Hidden, phases: Phases | None, ops: Ops) -> Queries:
        """Each head's query against the latent, then its part that turns; [s, t, 1, h, rank + rope_dim]."""
        config, latent = self.config, self.latent
        content, turning = jnp.split(self._project(x, ops), [latent.content_dim], axis=-1)
        axes, shape = ("heads", "head", "latent"), (config.heads, latent.content_dim, latent.rank)
        key_up = weight(self, "key_up", axes, shape, self.dtype)
        content = jnp.einsum("sthn,hnr->sthr", content, key_up, precision=HIGHEST)
        turning = turning if phases is None else rotate(turning, phases)
        return jnp.concatenate([content, turning], axis=-1)[:, :, None]

    def _project(self, x: Hidden, ops: Ops) -> Float[Array, "s t h c"]:
        """Queries of all heads, content first, through a latent of their own where there is one."""
        config, rank = self.config, self.latent.query_rank
        shape = (config.heads, config.head_dim)
        if rank is None:
            return ops.matmul(x, weight(self, "query", ("heads", "head", "width"), (*shape, config.width), self.dtype))
        down = ops.matmul(x, weight(self, "q_down", ("latent", "width"), (rank, config.width), self.dtype))
        down = rms_norm(down, norm_weight(self, "q_norm", ("latent",), (rank,)), self.latent.norm_eps)
        return ops.matmul(down, weight(self, "q_up", ("heads", "head", "latent"), (*shape, rank), self.dtype))
