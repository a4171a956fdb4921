"""What lives on the device between steps: the page pool and what each slot remembers.

Knows: shapes, shardings and how a slot is written. Slots of padding rows are m, past the end, so that their writes are
dropped; -1 would wrap to the last slot even with `mode="drop"`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Int32

from jaxinfer.arrays import Pages, RowBool, RowInt, Slots
from jaxinfer.config import ModelConfig
from jaxinfer.engine.cache import make_pages
from jaxinfer.engine.sharding import pages_sharding, replicated


class History(NamedTuple):
    """What penalties and biases need to know of a slot; only true for slots seated with a history."""

    in_prompt: Bool[Array, "*m v"]
    counts: Int32[Array, "*m v"]
    """How often each token occurs in the output so far."""
    bias: Float32[Array, "*m v"]


HistoryRow = tuple[Bool[Array, " v"], Int32[Array, " v"], Float32[Array, " v"]]
"""The fields of History for one slot."""


class EngineState(NamedTuple):
    """Donated to every step and returned by it."""

    pages: tuple[Pages, ...]
    last_token: Int32[Array, " m"]
    history: History


def state_shardings(config: ModelConfig, mesh: Mesh) -> Any:
    """An EngineState of shardings: pages by kv head, the rest replicated."""
    whole: Any = replicated(mesh)
    pages: Any = (pages_sharding(config, mesh),) * config.layers
    return EngineState(pages, whole, History(whole, whole, whole))


def make_state(
    config: ModelConfig, *, pages: int, page_size: int, slots: int, vocab: int, dtype: Any, mesh: Mesh
) -> EngineState:
    """A zeroed state on the mesh; dtype is that of the pages."""

    def zeros() -> tuple[Int32[Array, " m"], History]:
        rows = (slots, vocab)
        history = History(jnp.zeros(rows, bool), jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32))
        return jnp.zeros(slots, jnp.int32), history

    last_token, history = jax.jit(zeros, out_shardings=replicated(mesh))()
    return EngineState(make_pages(config, pages, page_size, dtype, mesh), last_token, history)


def seat(history: History, slot: Int32[Array, ""], row: HistoryRow) -> History:
    """`history` with one slot replaced. DONATES `history`."""
    return History(*(whole.at[slot].set(one, mode="drop") for whole, one in zip(history, row, strict=True)))


def record(state: EngineState, slots: Slots, tokens: RowInt, penalised: RowBool) -> EngineState:
    """`state` after each slot's token was chosen; a slot of m is dropped. DONATES `state`.

    A broken row's token is -1: the slot then holds token 0, which nobody will read.
    """
    tokens = jnp.maximum(tokens, 0)
    counted = jnp.where(penalised, slots, state.last_token.shape[0])
    counts = state.history.counts.at[counted, tokens].add(1, mode="drop")
    last_token = state.last_token.at[slots].set(tokens, mode="drop")
    return state._replace(last_token=last_token, history=state.history._replace(counts=counts))
