"""Requests come, step, stop, run late and drain in any order: nothing leaks, nobody starves, outputs never change.

A Hypothesis state machine over the real loop and a scripted device that reads every position of every row back through
its page table (`tests/scheduler/scripted.py`). After each rule the books must balance; at the end every request has one
end, and what it got is what it gets alone.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.errors import Overloaded, Unavailable
from jaxinfer.request import FinishReason, Request, SamplingParams
from jaxinfer.scheduler.loop import EngineLoop

from .scheduler.scripted import LIMITS, Collector, ScriptedRunner, finish_all, make_request, prompt, solo

ABORTS = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.STOP)

POOLS = (
    LIMITS,
    replace(LIMITS, pages=7, slots=3),
    replace(LIMITS, pages=12, slots=6, step_tokens=4, chunk=4),
    replace(LIMITS, slots=1, context=20),
)


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    most = draw(st.integers(1, 30))
    return SamplingParams(
        max_tokens=most,
        min_tokens=draw(st.integers(0, min(most, 6))),
        n=draw(st.sampled_from((1, 1, 1, 2, 4))),
        presence_penalty=draw(st.sampled_from((0.0, 0.0, 1.0))),
    )


def assert_outcome(collector: Collector, request: Request, runner: ScriptedRunner, *, aborted: bool) -> None:
    """Each choice ended as it does alone, or was aborted on the way there."""
    for choice in range(request.params.n):
        tokens, finish = collector.result(request.id, choice)
        alone = solo(request, runner.limits, choice)
        if aborted and finish in ABORTS and (tokens, finish) != alone:
            assert tokens == alone[0][: len(tokens)]
            assert collector.ends[request.id, choice].stop_id is None
        else:
            assert (tokens, finish) == alone


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(limits=st.sampled_from(POOLS), prefix_cache=st.booleans(), deterministic=st.booleans())
    def start(self, limits, prefix_cache, deterministic):
        self.now = 0.0
        self.runner = ScriptedRunner(limits)
        self.loop = EngineLoop(
            self.runner, queue=12, prefix_cache=prefix_cache, deterministic=deterministic, clock=lambda: self.now
        )
        self.deterministic = deterministic
        self.collector = Collector()
        self.requests: list[Request] = []
        self.aborted: set[str] = set()
        self.draining = False
        self.interrupted = False
        self.runner.fail = self.interrupt_fetch

    def interrupt_fetch(self, call: str, number: int) -> None:
        if call == "fetch" and self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt

    # ---- rules -------------------------------------------------------------------------------------------------------

    @rule(
        length=st.integers(1, 28),
        prefix=st.integers(0, 2),
        cache_salt=st.sampled_from(("", "", "x")),
        priority=st.sampled_from((0, 0, 0, 1, -1)),
        stops=st.frozensets(st.integers(1, LIMITS.vocab_size - 1), max_size=4),
        params=sampling(),
        patience=st.sampled_from((None, None, None, 1.0, 4.0)),
    )
    def add(self, length, prefix, cache_salt, priority, stops, params, patience):
        length = min(length, self.runner.limits.context - 1, self.runner.limits.pages * self.runner.limits.page_size)
        request = make_request(
            f"r{len(self.requests)}",
            len(self.requests),
            prompt(length, prefix),
            params=params,
            stop_ids=stops,
            arrival=self.now,
            deadline=None if patience is None else self.now + patience,
            priority=priority,
            cache_salt=cache_salt,
        )
        try:
            self.loop.add(request)
        except Overloaded:
            assert self.loop.stats().waiting >= 12
        except Unavailable:
            assert self.draining
        else:
            assert not self.draining
            self.runner.expect(request)
            self.requests.append(request)
            if patience is not None:
                self.aborted.add(request.id)

    @rule(steps=st.integers(1, 8))
    def step(self, steps):
        for _ in range(steps):
            before = len(self.runner.plans), self.runner.fetched
            busy = self.loop.busy
            events = self.loop.step()
            self.collector.feed(events)
            after = len(self.runner.plans), self.runner.fetched
            assert not busy or events or after != before, "a busy loop stood still"
            assert len(self.runner.plans) - self.runner.fetched <= 1

    @rule()
    def step_interrupted(self):
        self.interrupted = True
        try:
            self.collector.feed(self.loop.step())
        except KeyboardInterrupt:
            assert len(self.runner.plans) - self.runner.fetched >= 1
        self.interrupted = False

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), reason=st.sampled_from(ABORTS))
    def stop(self, data, reason):
        request = data.draw(st.sampled_from(self.requests))
        choice = data.draw(st.sampled_from((None, *range(request.params.n))))
        self.loop.stop(request.id, reason, choice)
        self.aborted.add(request.id)
        self.collector.feed(self.loop.step())
        gone = range(request.params.n) if choice is None else (choice,)
        assert all((request.id, each) in self.collector.ends for each in gone)

    @rule(seconds=st.sampled_from((0.5, 2.0)))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: len(self.requests) > 8)
    @rule()
    def drain(self):
        self.loop.drain()
        self.draining = True

    # ---- invariants --------------------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self):
        if not hasattr(self, "loop"):
            return
        assert not self.loop.broken
        self.loop.check()
        state = self.loop._state
        held = Counter(page for sequence in state.running for page in sequence.pages)
        assert self.loop.stats().free_pages + len(held) == self.runner.limits.pages
        assert all(state.pool.is_free(page) != (page in held) for page in range(self.runner.limits.pages))
        assert all(len(sequence.pages) <= sequence.final_pages for sequence in state.running)
        assert len(state.running) + len(state.free_slots) == self.runner.limits.slots
        assert not (self.deterministic and state.preemptions)

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        finish_all(self.loop, self.collector)
        for request in self.requests:
            assert_outcome(self.collector, request, self.runner, aborted=request.id in self.aborted)
        assert len(self.collector.ends) == sum(request.params.n for request in self.requests)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_two_thousand_requests_with_random_cancels_return_to_the_idle_baseline(prefix_cache):
    chance = random.Random(2)
    runner = ScriptedRunner(replace(LIMITS, pages=24, slots=8, step_tokens=24))
    loop = EngineLoop(runner, queue=64, prefix_cache=prefix_cache)
    baseline = loop.stats().free_pages
    collector, requests, aborted = Collector(), [], set()
    while len(requests) < 2_000:
        while loop.stats().waiting < 8:
            seed = len(requests)
            params = SamplingParams(max_tokens=chance.randint(1, 16), n=chance.choice((1, 1, 1, 3)))
            tokens = prompt(chance.randint(1, 31), chance.randint(0, 5))
            requests.append(make_request(str(seed), seed, tokens, params=params, stop_ids=frozenset({1, 2})))
            loop.add(runner.expect(requests[-1]))
        if chance.random() < 0.4:
            victim = chance.choice(requests[-16:])
            aborted.add(victim.id)
            loop.stop(victim.id, FinishReason.CANCELLED, chance.choice((None, 0)))
        collector.feed(loop.step())
    finish_all(loop, collector)
    assert loop.stats().free_pages == baseline
    assert loop.stats().preemptions > 0
    cancelled = sum(end.finish is FinishReason.CANCELLED for end in collector.ends.values())
    assert cancelled > 100
    for request in requests:
        assert_outcome(collector, request, runner, aborted=request.id in aborted)
