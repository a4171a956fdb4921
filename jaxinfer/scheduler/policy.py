"""What the next step does: who decodes, who prefills how much, who is let in, who must give way.

Knows: the order of the queues and the limits. Runs nothing and reads no clock. The rules:

* Every decoding sequence has a row in every step, so the gap between two tokens is bounded: one decode call and
  `Limits.step_tokens` of prefill.
* Prefill runs in chunks that start on a page (deterministic: at a multiple of the longest chunk) and end on one, but
  for the last of a prompt.
* Admission goes by rank (priority, then arrival) and counts pages. Who does not fit may be passed by those behind, at
  most MAX_BYPASS times; after that nobody behind is let in until it fits. So a huge request does not hold up a few tiny
  ones, and tiny ones cannot starve it. A lower priority waits as long as higher ones keep coming: that is its meaning.
* When a decoding sequence needs a page and none is free, the last by rank gives all of its pages back and is computed
  again later. The first by rank is never preempted, so some sequence always comes to its end.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxinfer.plan import DecodeRow, PrefillChunk, Seat, StepPlan
from jaxinfer.scheduler.sequence import Sequence
from jaxinfer.scheduler.state import State

MAX_BYPASS = 16


@dataclass(slots=True)
class Step:
    """A plan in the making, and whose each part of it is: the tokens come back in this order.

    written: sequence, which of its admissions, and how many of its positions are written once the step completed.
    """

    seats: list[Seat] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)
    decodes: list[DecodeRow] = field(default_factory=list)
    prefill_owners: list[Sequence] = field(default_factory=list)
    decode_owners: list[Sequence] = field(default_factory=list)
    written: list[tuple[Sequence, int, int]] = field(default_factory=list)

    @property
    def plan(self) -> StepPlan | None:
        """What the engine is asked for; None where there is nothing to do."""
        if not self.prefills and not self.decodes:
            return None
        return StepPlan(tuple(self.seats), tuple(self.prefills), tuple(self.decodes))


def plan_step(state: State, now: float) -> Step:
    """Plan one step and move `state` to where it will stand after it."""
    step = Step()
    plan_decodes(state, step)
    budget = state.limits.step_tokens
    for sequence in state.running:
        if sequence.prefilling:
            budget = plan_chunks(state, step, sequence, budget)
    admit_waiting(state, step, budget, now)
    return step


def plan_decodes(state: State, step: Step) -> None:
    """A row for every decoding sequence, the first by rank first, so that a victim has no row in this plan yet."""
    for sequence in tuple(state.running):
        if sequence.slot is not None and sequence.decoding:
            make_room(state, sequence)
        if sequence.slot is not None and sequence.decoding:
            plan_decode(step, sequence)


def make_room(state: State, sequence: Sequence) -> None:
    """Give `sequence` the page of its next position, preempting from the last by rank, itself included."""
    while sequence.slot is not None and len(sequence.pages) < sequence.pages_for(sequence.planned + 1):
        if state.pool.free:
            state.grow(sequence, 1)
        else:
            state.preempt(state.running[-1])


def plan_decode(step: Step, sequence: Sequence) -> None:
    """Run the token that the device chose last, and choose the next."""
    assert sequence.slot is not None
    step.decodes.append(DecodeRow(sequence.slot, sequence.planned, sequence.pages, sequence.row))
    step.decode_owners.append(sequence)
    sequence.planned += 1
    sequence.in_flight += 1
    step.written.append((sequence, sequence.admissions, sequence.planned))


def plan_chunks(state: State, step: Step, sequence: Sequence, budget: int) -> int:
    """Prefill what `budget` allows of `sequence`; returns what is left of it, 0 where the prompt is unfinished."""
    while sequence.prefilling:
        left = sequence.prefill_end - sequence.planned
        count = min(left, budget, state.limits.chunk)
        if count < left:
            count -= count % state.chunk_grain
        if count == 0:
            return 0
        plan_chunk(step, sequence, count)
        budget -= count
    return budget


def plan_chunk(step: Step, sequence: Sequence, count: int) -> None:
    """Prefill its next `count` tokens; the last chunk chooses a token, and before that loads the slot's history."""
    assert sequence.slot is not None
    start, end = sequence.planned, sequence.planned + count
    samples = end == sequence.prefill_end
    row = sequence.row
    tokens = sequence.tokens[start:end]
    step.prefills.append(PrefillChunk(sequence.slot, tokens, start, sequence.pages, samples, row))
    sequence.planned = end
    step.written.append((sequence, sequence.admissions, end))
    if not samples:
        return
    if row.params.needs_history:
        step.seats.append(Seat(sequence.slot, sequence.request.prompt, sequence.output, row.params.logit_bias))
    step.prefill_owners.append(sequence)
    sequence.in_flight += 1


def admit_waiting(state: State, step: Step, budget: int, now: float) -> None:
    """Let waiting sequences in and start their prefill while the budget lasts."""
    while budget:
        sequence = next_admissible(state)
        if sequence is None:
            return
        state.admit(sequence, now)
        budget = plan_chunks(state, step, sequence, budget)


def next_admissible(state: State) -> Sequence | None:
    """The first by rank that fits, unless somebody before it has been passed MAX_BYPASS times."""
    room = state.room
    if room == 0:  # everybody needs a page at least: the last token is no hit
        return None
    blocked: Sequence | None = None
    for sequence in first_ready(state):
        if state.can_admit(sequence, room):
            if blocked is not None:
                blocked.bypassed += 1
            return sequence
        blocked = blocked or sequence
        if blocked.bypassed >= MAX_BYPASS:
            return None
    return None


def first_ready(state: State) -> Iterator[Sequence]:
    """The first ready ones of the queue, MAX_BYPASS past the head: looking at each costs a prefix match."""
    ready = (sequence for sequence in state.waiting if sequence.ready)
    return (sequence for _, sequence in zip(range(MAX_BYPASS + 1), ready, strict=False))
