"""The decoder: embedding, blocks, final norm, head; and the shapes and logical axes of its parameters.

Knows: the order of the parts, and that the cache is an argument and a result. Knows nothing of jit, devices, sampling.

Layers are unrolled. Inside `lax.scan` over stacked layers XLA on CPU copies each slice of the weights: 256 MB of
weights took 52 ms a pass, against 11.5 ms unrolled.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxinfer.arrays import Hidden, Logits, Pages, Positions, RowInt, Tokens
from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.model.attention import Attention
from jaxinfer.model.experts import Experts
from jaxinfer.model.latent import LatentAttention
from jaxinfer.model.layers import MLP, norm_weight, rms_norm, softcap, weight
from jaxinfer.model.ops import Ops, TokenBatch, pick
from jaxinfer.model.plain_ops import ShapeOps
from jaxinfer.model.quantised import Kind, abstract
from jaxinfer.model.rope import Phases, rope_phases


class DecoderBlock(nn.Module):
    """Attention and MLP (or experts), each added to the residual stream; normed before, after, or both."""

    config: ModelConfig
    dtype: Any
    layer: int

    @nn.compact
    def __call__(
        self, x: Hidden, pages: Pages, batch: TokenBatch, phases: Phases | None, ops: Ops, last: RowInt | None
    ) -> tuple[Hidden, Pages]:
        """The residual stream after this block, and its pages. DONATES pages.

        With `last`, the stream of each row's token at that index alone: [s, 1, w].
        """
        added, pages = self._attention()(self._before("attention_norm", x), pages, batch, phases, ops, last)
        x = x if last is None else pick(x, last)
        x = self._add(x, self._after("attention_post_norm", added))
        added = self._mlp()(self._before("mlp_norm", x), ops)
        return self._add(x, self._after("mlp_post_norm", added)), pages

    def _attention(self) -> Attention | LatentAttention:
        config, window = self.config, self.config.window(self.layer)
        if config.latent is not None:
            return LatentAttention(config, config.latent, self.dtype, window, name="attention")
        return Attention(config, self.dtype, window, name="attention")

    def _mlp(self) -> MLP | Experts:
        experts = self.config.layer_experts(self.layer)
        if experts is not None:
            return Experts(self.config, experts, self.dtype, name="experts")
        return MLP(self.config, self.dtype, self.config.mlp_width, name="mlp")

    def _before(self, name: str, x: Hidden) -> Hidden:
        return self._norm(name, x) if self.config.pre_norms else x

    def _after(self, name: str, x: Hidden) -> Hidden:
        return self._norm(name, x) if self.config.post_norms else x

    def _norm(self, name: str, x: Hidden) -> Hidden:
        return rms_norm(x, norm_weight(self, name, ("width",), (self.config.width,)), self.config.norm_eps)

    def _add(self, x: Hidden, added: Hidden) -> Hidden:
        """x plus `added` times the residual scale, which is a float32 even beside bfloat16, as torch multiplies."""
        scale = self.config.residual_scale
        return x + (added if scale == 1.0 else (added.astype(jnp.float32) * scale).astype(added.dtype))


class Transformer(nn.Module):
    """A decoder-only language model; `dtype` is that of weights, residual stream and cache (norm weights: float32)."""

    config: ModelConfig
    dtype: Any

    def setup(self) -> None:
        """Declare the parameters; the blocks are named block_0, block_1, ..."""
        config, table = self.config, (self.config.vocab_size, self.config.width)
        self.embedding = weight(self, "embedding", ("vocab", "width"), table, self.dtype)
        self.block = [DecoderBlock(config, self.dtype, layer) for layer in range(config.layers)]
        self.final_norm = norm_weight(self, "final_norm", ("width",), (config.width,))
        if not config.tied_head:
            self.head = weight(self, "head", ("vocab", "width"), table, self.dtype)

    def __call__(
        self, batch: TokenBatch, pages: tuple[Pages, ...], ops: Ops, last: RowInt | None = None
    ) -> tuple[Hidden, tuple[Pages, ...]]:
        """Every token's hidden state after the final norm, and the pool with this step's keys. DONATES pages.

        With `last`, the hidden state of each row's token at that index alone, [s, 1, w]: the last block then takes the
        other tokens no further than their keys and values, for nothing after it reads them.
        """
        config, phases = self.config, self._phases(batch.positions)
        x, written = self._embed(batch.tokens, ops), []
        for layer, (block, layer_pages) in enumerate(zip(self.block, pages, strict=True)):
            wanted = last if layer == config.layers - 1 else None
            x, layer_pages = block(x, layer_pages, batch, phases[config.layer_rope(layer)], ops, wanted)
            written.append(layer_pages)
        return rms_norm(x, self.final_norm, config.norm_eps), tuple(written)

    def logits(self, hidden: Float[Array, "s w"], ops: Ops) -> Logits:
        """Next-token logits of the rows given, float32, scaled and capped. Call as `apply(..., method="logits")`."""
        head, scale = self.embedding if self.config.tied_head else self.head, self.config.logit_scale
        logits = ops.matmul(hidden, head, dtype=jnp.float32)
        return softcap(logits if scale == 1.0 else logits * scale, self.config.logit_softcap)

    def _embed(self, tokens: Tokens, ops: Ops) -> Hidden:
        """Rows of the embedding. The scale is rounded to the weights' dtype first, as Gemma was trained."""
        x = ops.take(self.embedding, tokens)
        return x if self.config.embedding_scale == 1.0 else x * jnp.asarray(self.config.embedding_scale, self.dtype)

    def _phases(self, positions: Positions) -> dict[RopeConfig | None, Phases | None]:
        """The rotary angles of each kind of layer, made once; None for layers where nothing turns."""
        config = self.config
        size = config.latent.rope_dim if config.latent else config.head_dim
        ropes = dict.fromkeys(map(config.layer_rope, range(config.layers)))  # in order: a set's changes by process
        return {rope: None if rope is None else rope_phases(rope, size, positions, config.context) for rope in ropes}


def _init_boxed(config: ModelConfig, dtype: Any, key: jax.Array) -> Any:
    one = jnp.zeros((1, 1), jnp.int32)
    planes, heads, features = config.cache_shape
    pages = jnp.zeros((1, planes, heads, 1, features), dtype)
    batch = TokenBatch(one, one, one, jnp.ones(1, jnp.int32))
    return Transformer(config, dtype).init(key, batch, (pages,) * config.layers, ShapeOps())["params"]


def init_params(config: ModelConfig, dtype: Any, key: jax.Array) -> Any:
    """Random parameters as a plain nested dict: the start of a training run, and what tests and plans stand on."""
    return nn.meta.unbox(_init_boxed(config, dtype, key))


def abstract_params(config: ModelConfig, dtype: Any, quantize: Kind | None = None) -> Any:
    """The parameter tree as `jax.ShapeDtypeStruct` leaves, some in Quantised ones; nothing is allocated."""
    plain = jax.eval_shape(lambda key: init_params(config, dtype, key), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: abstract(tuple(key.key for key in path), leaf, quantize), plain
    )


def logical_axes(config: ModelConfig) -> Any:
    """The parameter tree with a tuple of axis names per leaf: vocab, width, kv_heads, group, head, gate_up, mlp."""
    boxed = jax.eval_shape(lambda key: _init_boxed(config, jnp.float32, key), jax.random.key(0))
    return jax.tree.map(lambda box: box.names, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
