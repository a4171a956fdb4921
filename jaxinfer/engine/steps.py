"""The step functions: all that runs on the device while serving, and the only place where it is jitted.

Knows: the order inside a step: forward pass, logits of the rows that sample, choice, record. Holds no state: it comes
in donated and goes out new. Parameters are an argument, never a closure.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int32

from jaxinfer.arrays import RowInt, Tokens
from jaxinfer.config import ModelConfig
from jaxinfer.engine.batches import Layout, Rows, StepRows, unpack
from jaxinfer.engine.ops import PagedOps
from jaxinfer.engine.sampling import Packed, sample
from jaxinfer.engine.sharding import replicated
from jaxinfer.engine.state import EngineState, HistoryRow, record, seat, state_shardings
from jaxinfer.model.ops import TokenBatch
from jaxinfer.model.transformer import Transformer
from jaxinfer.request import MAX_LOGPROBS


@dataclass(frozen=True)
class Program:
    """What is static in every step: the model, its operations, the row layout, and where things lie.

    shardings: an EngineState of shardings, which every step returns its state in. whole: replicated.
    """

    model: Transformer
    ops: PagedOps
    layout: Layout
    shardings: Any
    whole: NamedSharding

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        dtype: Any,
        held: Any,
        layout: Layout,
        mesh: Mesh,
        forms: Mapping[str, str],
        *,
        traced_with: Hashable = None,
    ) -> "Program":
        """The program of a model on a mesh, whose devices say what platform it is for; pages are of dtype `held`.

        forms, traced_with: as `PagedOps` takes them. Raises ValueError as it does.
        """
        ops = PagedOps.of_model(config, held, mesh, forms, traced_with=(jnp.dtype(dtype), layout, traced_with))
        return cls(Transformer(config, jnp.dtype(dtype)), ops, layout, state_shardings(config, mesh), replicated(mesh))


def _forward(
    params: Any, state: EngineState, tokens: Tokens, rows: StepRows, program: Program
) -> tuple[EngineState, Float[Array, "s w"]]:
    """The state with this step's keys written, and each row's hidden state at its last token."""
    batch = TokenBatch(tokens, rows.positions, rows.page_table, rows.lengths)
    last = jnp.maximum(rows.valid - 1, 0) if tokens.shape[1] > 1 else None
    hidden, pages = program.model.apply({"params": params}, batch, state.pages, program.ops, last)
    return state._replace(pages=pages), hidden[:, 0]


def _choose(params: Any, state: EngineState, hidden: Float[Array, "s w"], rows: StepRows, program: Program) -> Packed:
    logits: Any = program.model.apply({"params": params}, hidden, program.ops, method="logits")
    logits = lax.with_sharding_constraint(logits[:, : program.layout.vocab], program.whole)
    return sample(logits, state.history, rows.slots, rows.how)


def _finish(state: EngineState, output: Packed, rows: StepRows, program: Program) -> tuple[EngineState, Packed]:
    penalised = rows.how.history & rows.samples
    state = record(state, rows.slots, output[:, 0], penalised)
    return lax.with_sharding_constraint((state, output), (program.shardings, program.whole))


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def seat_step(state: EngineState, slot: Int32[Array, ""], row: HistoryRow, *, program: Program) -> EngineState:
    """Give `slot` the history `row`. DONATES `state`."""
    state = state._replace(history=seat(state.history, slot, row))
    return lax.with_sharding_constraint(state, program.shardings)


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def prefill_step(params: Any, state: EngineState, packed: Rows, *, program: Program) -> tuple[EngineState, Packed]:
    """Run a chunk of one sequence; choose the token after it where the row samples. DONATES `state`.

    A chunk that does not sample pays for no vocabulary matmul and leaves the slot's last token alone.
    """
    rows = unpack(packed, program.layout)
    state, hidden = _forward(params, state, rows.tokens, rows, program)
    output = lax.cond(
        jnp.any(rows.samples),
        lambda: _choose(params, state, hidden, rows, program),
        lambda: jnp.zeros((packed.shape[0], 2 + 2 * MAX_LOGPROBS), jnp.int32),
    )
    return _finish(state, output, rows, program)


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def decode_step(params: Any, state: EngineState, packed: Rows, *, program: Program) -> tuple[EngineState, Packed]:
    """Run each row's last token and choose the one after it. DONATES `state`.

    The ids come from the state, so this step can be dispatched before the host has seen them.
    """
    rows = unpack(packed, program.layout)
    tokens: RowInt = state.last_token.at[rows.slots].get(mode="clip")
    state, hidden = _forward(params, state, tokens[:, None], rows, program)
    return _finish(state, _choose(params, state, hidden, rows, program), rows, program)
