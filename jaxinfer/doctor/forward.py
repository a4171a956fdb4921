"""Our decoder over one prompt: what each of its parts made, and the tokens that follow.

Knows: how the parts' outputs are caught, by Flax's own recording of what modules return, so that the arithmetic is the
one that serves. Knows no reference.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float32

from jaxinfer.arrays import Pages
from jaxinfer.config import MeshConfig, ModelConfig
from jaxinfer.engine.cache import make_pages, pages_per_sequence
from jaxinfer.engine.ops import PagedOps, shapes_of
from jaxinfer.engine.sharding import make_mesh
from jaxinfer.model.ops import Ops, TokenBatch
from jaxinfer.model.transformer import Transformer

PAGE = 64
EMBEDDING, FINAL, LOGITS = "embedding", "final norm", "logits"

Activations = Mapping[str, Float32[np.ndarray, "t features"]]
"""What each part of a decoder made of each token, by the part's name, in the order of `part_names`."""


def part_names(layers: int) -> list[str]:
    """The parts of a decoder, in the order in which they are computed."""
    blocks = [f"block {i} {what}" for i in range(layers) for what in ("attention output", "MLP output", "output")]
    return [EMBEDDING, *blocks, FINAL, LOGITS]


class Probe:
    """A model over pages of its own, for one sequence of up to `size` tokens; makes ids below `vocabulary` alone."""

    def __init__(self, config: ModelConfig, params: Any, dtype: str, size: int, vocabulary: int) -> None:
        count, mesh = pages_per_sequence(PAGE, size), make_mesh(MeshConfig())
        self._model, self._params = Transformer(config, jnp.dtype(dtype)), params
        self._ops = PagedOps.of_model(config, dtype, mesh, traced_with=(dtype, size, shapes_of(params)))
        self._vocabulary = vocabulary
        self._table = np.arange(count, dtype=np.int32)[None]
        self._pages = make_pages(config, count, PAGE, jnp.dtype(dtype), mesh)

    @property
    def why(self) -> str:
        """Which kernels run, one operation a line."""
        return self._ops.why

    def activations(self, ids: Sequence[int]) -> Activations:
        """Every part's output for every token of `ids`, float32."""
        caught, self._pages = _catch(self._params, self._pages, self._batch(ids, 0), model=self._model, ops=self._ops)
        return {name: np.asarray(caught[name], np.float32) for name in part_names(self._model.config.layers)}

    def greedy(
        self, ids: Sequence[int], logits: Float32[np.ndarray, " v"], steps: int, ends: frozenset[int]
    ) -> tuple[list[int], bool]:
        """Up to `steps` tokens behind `ids`, which were run and gave `logits` for the first; up to one of `ends`.

        The second value says whether all logits were finite; what is not ends the text.
        """
        made: list[int] = []
        while np.isfinite(logits).all():
            made.append(int(logits[: self._vocabulary].argmax()))
            if len(made) == steps or made[-1] in ends:
                return made, True
            batch = self._batch([made[-1]], len(ids) + len(made) - 1)
            found, self._pages = _next_logits(self._params, self._pages, batch, model=self._model, ops=self._ops)
            logits = np.asarray(found)
        return made, False

    def _batch(self, ids: Sequence[int], start: int) -> TokenBatch:
        row: Any = (
            np.array([ids], np.int32),
            np.arange(start, start + len(ids), dtype=np.int32)[None],
            self._table,
            np.array([start + len(ids)], np.int32),
        )
        return TokenBatch(*row)


def _is_part(module: nn.Module, method: str) -> bool:
    return method in ("__call__", "_embed")


@partial(jax.jit, static_argnames=("model", "ops"), donate_argnames="pages")
def _catch(
    params: Any, pages: tuple[Pages, ...], batch: TokenBatch, *, model: Transformer, ops: Ops
) -> tuple[dict[str, Float32[Array, "t features"]], tuple[Pages, ...]]:
    """The parts' outputs by name, and the pages. DONATES pages."""
    forward: Any = model.apply(
        {"params": params}, batch, pages, ops, capture_intermediates=_is_part, mutable=["intermediates"]
    )
    (hidden, written), state = forward
    seen = state["intermediates"]
    parts: dict[str, Any] = {EMBEDDING: seen["_embed"][0]}
    for i in range(model.config.layers):
        block = seen[f"block_{i}"]
        inner = block["experts" if "experts" in block else "mlp"]
        parts[f"block {i} attention output"] = block["attention"]["__call__"][0][0]
        parts[f"block {i} MLP output"] = inner["__call__"][0]
        parts[f"block {i} output"] = block["__call__"][0][0]
    rows = {name: x[0].astype(jnp.float32) for name, x in {**parts, FINAL: hidden}.items()}
    logits: Any = model.apply({"params": params}, hidden[0], ops, method="logits")
    return {**rows, LOGITS: logits}, written


@partial(jax.jit, static_argnames=("model", "ops"), donate_argnames="pages")
def _next_logits(
    params: Any, pages: tuple[Pages, ...], batch: TokenBatch, *, model: Transformer, ops: Ops
) -> tuple[Float32[Array, " v"], tuple[Pages, ...]]:
    """Logits behind the only token of `batch`, and the pages. DONATES pages."""
    forward: Any = model.apply({"params": params}, batch, pages, ops)
    hidden, written = forward
    logits: Any = model.apply({"params": params}, hidden[0], ops, method="logits")
    return logits[0], written
