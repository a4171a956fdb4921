"""What the scheduler asks of the engine in one step, and the tokens that the engine gives back.

Knows: slots, pages, positions and ids as plain numbers. Positions and lengths count tokens. Knows nothing of JAX.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxinfer.request import SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can hold, fixed at start; the scheduler plans within it.

    slots: rows of the largest decode step. pages, page_size: the pool. context: most tokens of one sequence, prompt and
    output together. chunk: most prompt tokens of one prefill call (a multiple of page_size). step_tokens: most prompt
    tokens prefilled in one step, over all calls.
    """

    slots: int
    pages: int
    page_size: int
    context: int
    chunk: int
    step_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class RowParams:
    """Everything that choosing a token for one sequence depends on, besides the logits and the slot's history."""

    params: SamplingParams
    seed: int
    choice: int
    stop_ids: frozenset[int]
    ban_stops: bool
    """True while fewer than `min_tokens` tokens exist: the stop ids get probability zero."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Load a slot's history on the device before it is sampled for (only where `params.needs_history`)."""

    slot: int
    prompt: Sequence[int]
    output: Sequence[int]
    logit_bias: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Run `tokens` at positions start, start + 1, ... of a sequence; sample after the last token where `samples`.

    `pages` is the sequence's page table so far and covers start + len(tokens) positions. The engine reads it before
    `dispatch` returns and never keeps it.
    """

    slot: int
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    samples: bool
    row: RowParams


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Run the slot's last sampled token, which the device holds, at `position`; sample the token after it."""

    slot: int
    position: int
    pages: Sequence[int]
    row: RowParams


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: seats first, then prefill calls in order, then one decode call over all rows."""

    seats: tuple[Seat, ...] = ()
    prefills: tuple[PrefillChunk, ...] = ()
    decodes: tuple[DecodeRow, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of one plan: one per sampling prefill chunk, in order, then one per decode row, in order."""

    prefills: tuple[SampledToken, ...]
    decodes: tuple[SampledToken, ...]
