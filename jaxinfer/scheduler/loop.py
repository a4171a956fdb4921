"""The engine's loop: takes requests in, plans, dispatches, and delivers the tokens of the step before.

One step is always in flight while there is work, so the device computes step n + 1 while the host handles the tokens
of step n. What the host cannot know yet it does not need: lengths are known ahead, the device holds its own last
tokens, and a stop id is seen one step late, its spare row dropped. Knows: requests, plans, token ids, the clock it was
given. Knows nothing of JAX, text, sockets or threads: one thread calls it.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from jaxinfer.errors import EngineFault, Overloaded, RequestError, Unavailable
from jaxinfer.plan import StepTokens
from jaxinfer.request import FinishReason, Request, SampledToken, TokenEvent
from jaxinfer.scheduler.intake import check_limits, check_request
from jaxinfer.scheduler.policy import Step, plan_step
from jaxinfer.scheduler.runner import Handle, Runner
from jaxinfer.scheduler.sequence import Sequence, Siblings, siblings_of
from jaxinfer.scheduler.state import State


@dataclass(frozen=True, slots=True)
class LoopStats:
    """Gauges of this moment (in sequences and pages) and counters since the start (in tokens and steps).

    cached_pages are those that a prompt could hit: some are in use, the others count as free_pages too. prompt_tokens
    and cached_tokens count first admissions only.
    """

    waiting: int
    running: int
    free_pages: int
    cached_pages: int
    total_pages: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    steps: int


class EngineLoop(Generic[Handle]):
    """Drives `runner`. `queue` requests may wait; `clock` is the one that arrivals and deadlines are read on.

    `prefix_cache` shares full pages between equal prefixes; `deterministic` as in `State`.
    """

    def __init__(
        self,
        runner: Runner[Handle],
        *,
        queue: int,
        prefix_cache: bool,
        deterministic: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_limits(runner.limits)
        self._runner = runner
        self._queue = queue
        self._clock = clock
        self._state = State(runner.limits, prefix_cache=prefix_cache, deterministic=deterministic)
        self._live: dict[str, Siblings] = {}
        self._in_flight: deque[tuple[Step, Handle]] = deque()
        self._stops: list[tuple[Sequence, FinishReason]] = []
        self._events: list[TokenEvent] = []
        self._fault: Exception | None = None
        self._draining = False
        self._added = self._steps = self._output_tokens = 0

    # ---- intake ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises PromptTooLong where it fits neither context nor pool, RequestError for an id that is still running or
        tokens out of the vocabulary, Overloaded where the queue is full, Unavailable while draining, EngineFault where
        the engine is broken.
        """
        self._refuse_if_broken()
        if self._draining:
            raise Unavailable("the engine is draining and takes no new request; send it to another server")
        if request.id in self._live:
            raise RequestError(f"request id {request.id!r} is still running; expected an id that is not in use")
        check_request(request, self._state.limits)
        if self._waiting_requests() >= self._queue:
            raise Overloaded(f"{self._queue} requests are waiting, as many as may; try again later")
        siblings = siblings_of(request, self._added, self._state.limits, sharing=self._state.cache.enabled)
        self._added += 1
        self._live[request.id] = siblings
        for sequence in siblings.choices:
            self._state.enqueue(sequence)

    def stop(self, request_id: str, reason: FinishReason, choice: int | None = None) -> None:
        """End a request, or one choice of it, at the next step, whatever it is doing; no-op where it is not running."""
        siblings = self._live.get(request_id, Siblings())
        self._stops += [(s, reason) for s in siblings.living if choice is None or s.choice == choice]

    def drain(self) -> None:
        """Take no more requests; those that are in finish."""
        self._draining = True

    # ---- the step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Plan and dispatch one step, then deliver the tokens of the step before.

        An exception of the runner, or an invariant that broke, ends every request with ERROR in the events of this
        step, and the loop raises EngineFault from then on.
        """
        self._refuse_if_broken()
        try:
            self._end_stopped()
            self._end_overdue()
            ahead = self._dispatch(plan_step(self._state, self._clock()))
            self._deliver_all_but(ahead)
            self._check_idle()
        except Exception as error:  # the engine's own failure reaches every caller, whatever its kind
            self._break(error)
        events, self._events = self._events, []
        return events

    def _dispatch(self, step: Step) -> int:
        """Start the step; returns how many steps are then ahead of the host's knowledge, 0 where there was no work."""
        plan = step.plan
        if plan is None:
            if self._live and not self._in_flight:
                raise EngineFault(f"{len(self._live)} requests wait and none can run; expected the first to fit always")
            return 0
        self._in_flight.append((step, self._runner.dispatch(plan)))
        self._steps += 1
        return 1

    def _deliver_all_but(self, ahead: int) -> None:
        # The entry goes only after its fetch, so that an interrupt inside fetch loses no token.
        while len(self._in_flight) > ahead:
            step, handle = self._in_flight[0]
            tokens = self._runner.fetch(handle)
            self._in_flight.popleft()
            self._deliver(step, tokens)

    def _deliver(self, step: Step, tokens: StepTokens) -> None:
        now = self._clock()
        for sequence, admission, end in step.written:
            if sequence.slot is not None and sequence.admissions == admission:
                self._state.publish(sequence, end)
        for sequence, token in zip(step.prefill_owners, tokens.prefills, strict=True):
            self._accept(sequence, token, now)
        for sequence, token in zip(step.decode_owners, tokens.decodes, strict=True):
            self._accept(sequence, token, now)

    def _accept(self, sequence: Sequence, token: SampledToken, now: float) -> None:
        sequence.in_flight -= 1
        if sequence.finish is not None:
            return  # the spare row of a choice that ended meanwhile
        if token.token < 0:
            self._state.distrust(sequence)
            self._finish(sequence, FinishReason.ERROR, error="the model's logits were not finite: no token to choose")
            return
        self._output_tokens += 1
        finish = sequence.accept(token.token, now)
        if finish is None:
            self._events.append(TokenEvent(sequence.request.id, sequence.choice, (token,)))
        else:
            self._finish(sequence, finish, token)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _end_stopped(self) -> None:
        stops, self._stops = self._stops, []
        for sequence, reason in stops:
            if sequence.finish is None:
                self._finish(sequence, reason)

    def _end_overdue(self) -> None:
        now = self._clock()
        overdue = [siblings for siblings in self._live.values() if siblings.deadline <= now]
        for siblings in overdue:
            for sequence in tuple(siblings.living):
                self._finish(sequence, FinishReason.DEADLINE)

    def _finish(
        self, sequence: Sequence, reason: FinishReason, token: SampledToken | None = None, error: str = ""
    ) -> None:
        self._state.retire(sequence)
        self._emit_end(sequence, reason, token, error)
        if sequence.siblings.leader is None:
            del self._live[sequence.request.id]

    def _emit_end(self, sequence: Sequence, reason: FinishReason, token: SampledToken | None, error: str) -> None:
        sequence.finish = reason
        self._events.append(
            TokenEvent(
                sequence.request.id,
                sequence.choice,
                tokens=(token,) if token else (),
                finish=reason,
                stop_id=token.token if token and reason is FinishReason.STOP else None,
                usage=sequence.usage,
                timing=sequence.timing(self._clock()),
                error=error,
            )
        )

    # ---- faults ------------------------------------------------------------------------------------------------------

    def _break(self, error: Exception) -> None:
        """End everything without touching the state that may be what broke, and start from an empty one."""
        self._fault = error
        message = f"the engine failed ({type(error).__name__}); this request cannot be finished"
        for sequence in [sequence for siblings in self._live.values() for sequence in siblings.living]:
            self._emit_end(sequence, FinishReason.ERROR, None, message)
        self._live.clear()
        self._in_flight.clear()
        old = self._state
        self._state = State(old.limits, prefix_cache=old.cache.enabled, deterministic=old.deterministic)

    @property
    def broken(self) -> bool:
        """True after a fault: readiness fails, and nothing more is served."""
        return self._fault is not None

    def _refuse_if_broken(self) -> None:
        if self._fault is not None:
            raise EngineFault(
                f"the engine failed earlier ({type(self._fault).__name__}); restart the server"
            ) from self._fault

    def _check_idle(self) -> None:
        if not self.busy:
            self.check()

    def check(self) -> None:
        """Raise EngineFault where pages, slots, queues and live requests do not add up."""
        self._state.check()
        queued = {id(sequence) for sequence in (*self._state.waiting, *self._state.running)}
        living = {id(sequence) for siblings in self._live.values() for sequence in siblings.living}
        if queued != living:
            raise EngineFault(f"{len(queued)} sequences are queued and {len(living)} live; expected the same ones")

    # ---- what the outside sees ---------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while a step would do something."""
        return bool(self._live or self._in_flight)

    def stats(self) -> LoopStats:
        """Gauges and counters; cheap enough for every scrape."""
        state = self._state
        return LoopStats(
            waiting=len(state.waiting),
            running=len(state.running),
            free_pages=state.pool.free,
            cached_pages=len(state.cache),
            total_pages=len(state.pool),
            prompt_tokens=state.prompt_tokens,
            cached_tokens=state.cached_tokens,
            output_tokens=self._output_tokens,
            preemptions=state.preemptions,
            steps=self._steps,
        )

    def _waiting_requests(self) -> int:
        return len({sequence.request.id for sequence in self._state.waiting})
