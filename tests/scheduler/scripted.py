"""A device of plain Python behind the Runner protocol, strict enough to catch every mix-up of pages, slots and tokens.

Per (page, offset) it stores what a real key-value pair depends on: a digest of the sequence up to that position. A step
runs when it is fetched, in dispatch order. Each row reads every position through the page table that its plan gave and
compares it with the truth, which `expect(request)` told; a decode row's token comes from the slot, never from the host.
The next token is a function of (all tokens, seed, choice) alone, so a request's output can be told without any
batching: `solo(request, limits)`.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

from jaxinfer.plan import DecodeRow, Limits, PrefillChunk, RowParams, Seat, StepPlan, StepTokens
from jaxinfer.request import FinishReason, Request, SampledToken, SamplingParams, TokenEvent
from jaxinfer.scheduler.loop import EngineLoop

BLANK = -1
LIMITS = Limits(slots=4, pages=16, page_size=4, context=48, chunk=8, step_tokens=12, vocab_size=16)


def extend(digest: int, token: int) -> int:
    """The digest of a sequence one token longer; what a key-value pair at that position depends on."""
    return hash((digest, token))


def choose(digest: int, row: RowParams, vocab_size: int) -> int:
    """The next token: any function of the whole sequence, the seed and the choice that bans what is banned."""
    token = hash((digest, row.seed, row.choice)) % vocab_size
    while row.ban_stops and token in row.stop_ids:
        token = (token + 1) % vocab_size
    return token


class Truth:
    """What one choice's tokens are, at any length, with no batch, page or slot involved."""

    def __init__(self, request: Request, choice: int, vocab_size: int) -> None:
        self.request, self.choice, self.vocab_size = request, choice, vocab_size
        self.tokens: list[int] = []
        self.digests: list[int] = []
        for token in request.prompt:
            self._append(token)

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self.digests.append(extend(self.digests[-1] if self.digests else 0, token))

    def grow(self, length: int) -> "Truth":
        """Make it `length` tokens long, past any stop: a spare row runs there."""
        while len(self.tokens) < length:
            ban = len(self.tokens) - len(self.request.prompt) < self.request.params.min_tokens
            params = self.request
            row = RowParams(params.params, params.seed, self.choice, params.stop_ids, ban_stops=ban)
            self._append(choose(self.digests[-1], row, self.vocab_size))
        return self


def most_tokens(request: Request, limits: Limits) -> int:
    """Where the choice ends with LENGTH, in the plainest words."""
    room = min(limits.context, limits.pages * limits.page_size + 1)
    return min(request.params.max_tokens, room - len(request.prompt))


def solo(request: Request, limits: Limits, choice: int = 0) -> tuple[list[int], FinishReason]:
    """Output and end of one choice that runs alone to its end."""
    start = len(request.prompt)
    output = Truth(request, choice, limits.vocab_size).grow(start + most_tokens(request, limits)).tokens[start:]
    for index, token in enumerate(output):
        if token in request.stop_ids and index >= request.params.min_tokens:
            return output[: index + 1], FinishReason.STOP
    return output, FinishReason.LENGTH


class ScriptedRunner:
    """The Runner. `nan_at` holds (seed, choice, output index) whose logits are not finite; `fail` is called at each
    dispatch and fetch with the call's name and number and may raise.
    """

    def __init__(self, limits: Limits = LIMITS, fail: Callable[[str, int], None] | None = None) -> None:
        self._limits = limits
        self.fail = fail
        self.nan_at: set[tuple[int, int, int]] = set()
        self.plans: list[StepPlan] = []
        self.fetched = 0
        self.cells = [[BLANK] * limits.page_size for _ in range(limits.pages)]
        self.last_token = [BLANK] * limits.slots
        self.history: list[list[int]] = [[] for _ in range(limits.slots)]
        self.truths: dict[tuple[int, int], Truth] = {}

    @property
    def limits(self) -> Limits:
        return self._limits

    def expect(self, request: Request) -> Request:
        """Tell the truth about a request before it is added; seeds must differ from request to request."""
        for choice in range(request.params.n):
            assert (request.seed, choice) not in self.truths, "two requests share a seed: the double cannot tell them"
            self.truths[request.seed, choice] = Truth(request, choice, self._limits.vocab_size)
        return request

    # ---- the protocol ------------------------------------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> int:
        if self.fail:
            self.fail("dispatch", len(self.plans))
        check_plan(plan, self._limits)
        self.plans.append(freeze(plan))
        return len(self.plans) - 1

    def fetch(self, handle: int) -> StepTokens:
        assert handle == self.fetched, f"fetched step {handle}; expected {self.fetched}: each once, in order"
        if self.fail:
            self.fail("fetch", handle)
        self.fetched += 1
        return self._run(self.plans[handle])

    # ---- the device --------------------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan) -> StepTokens:
        for seat in plan.seats:
            self.history[seat.slot] = [*seat.prompt, *seat.output]
        prefills = tuple(token for chunk in plan.prefills for token in self._prefill(chunk))
        decodes = tuple(self._decode(row) for row in plan.decodes)
        return StepTokens(prefills, decodes)

    def _prefill(self, chunk: PrefillChunk) -> tuple[SampledToken, ...]:
        for offset, token in enumerate(chunk.tokens):
            self._write(chunk.pages, chunk.start + offset, token)
        end = chunk.start + len(chunk.tokens)
        self._look(chunk.pages, end, chunk.row)
        return (self._sample(chunk.slot, end, chunk.row),) if chunk.samples else ()

    def _decode(self, row: DecodeRow) -> SampledToken:
        assert self.last_token[row.slot] != BLANK, f"slot {row.slot} decodes before anything was sampled for it"
        self._write(row.pages, row.position, self.last_token[row.slot])
        self._look(row.pages, row.position + 1, row.row)
        return self._sample(row.slot, row.position + 1, row.row)

    def _write(self, pages, position: int, token: int) -> None:
        before = self._read(pages, position - 1) if position else 0
        size = self._limits.page_size
        self.cells[pages[position // size]][position % size] = extend(before, token)

    def _read(self, pages, position: int) -> int:
        return self.cells[pages[position // self._limits.page_size]][position % self._limits.page_size]

    def _look(self, pages, length: int, row: RowParams) -> None:
        truth = self.truths[row.seed, row.choice].grow(length)
        seen = [cell for page in pages for cell in self.cells[page]][:length]
        wrong = [at for at, cell in enumerate(seen) if cell != truth.digests[at]]
        assert not wrong, f"seed {row.seed} choice {row.choice} reads wrong keys and values at positions {wrong}"

    def _sample(self, slot: int, length: int, row: RowParams) -> SampledToken:
        truth = self.truths[row.seed, row.choice].grow(length + 1)
        index = length - len(truth.request.prompt)
        assert row.ban_stops == (index < row.params.min_tokens), f"ban_stops is {row.ban_stops} at output {index}"
        if row.params.needs_history:
            assert self.history[slot] == truth.tokens[:length], f"slot {slot} knows the wrong history"
        token = choose(truth.digests[length - 1], row, self._limits.vocab_size)
        self.last_token[slot] = token
        self.history[slot].append(token)
        bad = (row.seed, row.choice, index) in self.nan_at
        return SampledToken(-1) if bad else SampledToken(token, logprob=-1.0)


def freeze(plan: StepPlan) -> StepPlan:
    """A copy of what the engine reads before dispatch returns, for it may not keep the lists."""
    chunks = tuple(replace(c, tokens=tuple(c.tokens), pages=tuple(c.pages)) for c in plan.prefills)
    rows = tuple(replace(r, pages=tuple(r.pages)) for r in plan.decodes)
    seats = tuple(Seat(s.slot, tuple(s.prompt), tuple(s.output), dict(s.logit_bias)) for s in plan.seats)
    return StepPlan(seats, chunks, rows)


def check_plan(plan: StepPlan, limits: Limits) -> None:
    """Everything that the engine relies on."""
    assert plan.prefills or plan.decodes, "an empty plan"
    slots = [row.slot for row in plan.decodes]
    prefill_slots = {chunk.slot for chunk in plan.prefills}
    assert len(slots) == len(set(slots)), "a slot decodes twice"
    assert not prefill_slots & set(slots), "a slot decodes while it prefills"
    assert all(0 <= slot < limits.slots for slot in (*slots, *prefill_slots))
    assert sum(len(chunk.tokens) for chunk in plan.prefills) <= limits.step_tokens
    sampling = {chunk.slot for chunk in plan.prefills if chunk.samples}
    assert {seat.slot for seat in plan.seats} <= sampling, "a seat without its sampling chunk"
    for chunk in plan.prefills:
        end = chunk.start + len(chunk.tokens)
        assert 0 < len(chunk.tokens) <= limits.chunk
        assert chunk.start % limits.page_size == 0, f"a chunk starts at {chunk.start}"
        assert chunk.samples or end % limits.page_size == 0, f"a chunk ends at {end}"
        assert end <= len(chunk.pages) * limits.page_size
        assert end < limits.context
    for row in plan.decodes:
        assert row.position < len(row.pages) * limits.page_size
        assert row.position < limits.context - 1, "a row whose token would pass the context"
    for pages in (part.pages for part in (*plan.prefills, *plan.decodes)):
        assert len(pages) == len(set(pages))
        assert all(0 <= page < limits.pages for page in pages)


@cache
def prompt(length: int, salt: int = 0, vocab_size: int = LIMITS.vocab_size) -> tuple[int, ...]:
    """`length` tokens; prompts of one `salt` are prefixes of one another."""
    return tuple(hash((salt, at)) % vocab_size for at in range(length))


def make_request(name: str, seed: int, tokens: tuple[int, ...], *, params: SamplingParams | None = None, **fields):
    """A request with few words; `seed` must be its own."""
    return Request(id=name, prompt=tokens, params=params or SamplingParams(max_tokens=6), seed=seed, **fields)


class Collector:
    """Gathers what a loop delivers and holds it to the contract of `TokenEvent`: one end, and nothing after it."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], TokenEvent] = {}

    def feed(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            key = event.request_id, event.choice
            assert key not in self.ends, f"{key} got an event after its end"
            self.tokens.setdefault(key, []).extend(token.token for token in event.tokens)
            if event.finish is None:
                assert event.tokens
                assert event.usage is event.timing is None
                continue
            assert event.usage is not None
            assert event.timing is not None
            assert event.usage.completion_tokens == len(self.tokens[key])
            assert len(event.timing.itl) == max(0, len(self.tokens[key]) - 1)
            assert (event.finish is FinishReason.ERROR) == bool(event.error)
            if event.stop_id is not None:  # None too where the driver stopped it, at a stop string
                assert (event.finish, event.stop_id) == (FinishReason.STOP, self.tokens[key][-1])
            self.ends[key] = event

    def result(self, name: str, choice: int = 0) -> tuple[list[int], FinishReason | None]:
        return self.tokens[name, choice], self.ends[name, choice].finish


def finish_all(loop: EngineLoop, collector: Collector | None = None, most_steps: int = 5_000) -> Collector:
    """Step until nothing is left, checking every invariant after each step."""
    collector = collector or Collector()
    for _ in range(most_steps):
        if not loop.busy:
            break
        collector.feed(loop.step())
        loop.check()
    assert not loop.busy, f"still busy after {most_steps} steps"
    stats = loop.stats()
    assert (stats.waiting, stats.running, stats.free_pages) == (0, 0, stats.total_pages)
    return collector


def assert_solo(collector: Collector, request: Request, limits: Limits = LIMITS) -> None:
    """Every choice of `request` got what it gets alone."""
    for choice in range(request.params.n):
        result = collector.result(request.id, choice)
        assert result == solo(request, limits, choice)
        assert (result[1] is FinishReason.STOP) == (collector.ends[request.id, choice].stop_id is not None)
