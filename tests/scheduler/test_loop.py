"""The loop: overlap, every end in every state, refusals, faults."""

from dataclasses import replace
from itertools import count

import pytest

from jaxinfer.errors import ConfigError, EngineFault, Overloaded, PromptTooLong, RequestError, Unavailable
from jaxinfer.request import FinishReason, SamplingParams
from jaxinfer.scheduler.loop import EngineLoop

from .scripted import LIMITS, Collector, ScriptedRunner, assert_solo, finish_all, make_request, prompt, solo

EVERY_STATE = range(14)  # queued, four prefill chunks, decoding, and past the end


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_loop(limits=LIMITS, *, queue=1_000, prefix_cache=True, **options):
    runner = ScriptedRunner(limits)
    return runner, EngineLoop(runner, queue=queue, prefix_cache=prefix_cache, **options)


def run_one(request, limits=LIMITS):
    runner, loop = make_loop(limits)
    loop.add(runner.expect(request))
    return runner, finish_all(loop)


# ---- equalities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_batched_equals_alone(prefix_cache, deterministic):
    runner, loop = make_loop(prefix_cache=prefix_cache, deterministic=deterministic)
    requests = []
    for seed in range(40):
        most = 1 + seed % 11
        params = SamplingParams(max_tokens=most, min_tokens=seed % most, n=1 + seed % 3, presence_penalty=seed % 2)
        tokens = prompt(1 + (7 * seed) % 40, salt=seed % 3)
        requests.append(make_request(f"r{seed}", seed, tokens, params=params, stop_ids=frozenset({1, 2})))
    for request in requests:
        loop.add(runner.expect(request))
    collector = finish_all(loop)
    assert {end.finish for end in collector.ends.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    for request in requests:
        assert_solo(collector, request)


def test_one_step_is_in_flight_while_there_is_work():
    runner, loop = make_loop()
    loop.add(runner.expect(make_request("a", 1, prompt(3), params=SamplingParams(max_tokens=5))))
    ahead = []
    while loop.busy:
        loop.step()
        ahead.append(len(runner.plans) - runner.fetched)
    assert ahead == [1, 1, 1, 1, 1, 0]


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 7])
def test_max_tokens_are_known_ahead_and_cost_no_spare_row(most):
    runner, collector = run_one(make_request("a", 1, prompt(5), params=SamplingParams(max_tokens=most)))
    assert collector.result("a")[1] is FinishReason.LENGTH
    assert sum(len(plan.decodes) for plan in runner.plans) == most - 1


@pytest.mark.parametrize("limits", [replace(LIMITS, context=20), replace(LIMITS, pages=5)])
def test_the_context_and_the_pool_end_with_length(limits):
    request = make_request("a", 1, prompt(15), params=SamplingParams(max_tokens=10_000))
    _, collector = run_one(request, limits)
    tokens, finish = collector.result("a")
    assert finish is FinishReason.LENGTH
    assert 15 + len(tokens) == min(limits.context, 4 * limits.pages + 1)


def test_a_stop_id_ends_one_step_late_and_its_spare_token_is_dropped():
    every = frozenset(range(LIMITS.vocab_size))
    params = SamplingParams(max_tokens=9, min_tokens=3)
    # With every id banned until three exist, the fourth token stops.
    request = make_request("a", 1, prompt(5), params=params, stop_ids=every - {0})
    runner, collector = run_one(request)
    tokens, finish = collector.result("a")
    assert (tokens, finish) == solo(request, LIMITS)
    assert tokens[:3] == [0, 0, 0]
    assert finish is FinishReason.STOP
    assert sum(len(plan.decodes) for plan in runner.plans) == len(tokens)  # one of them the spare


def test_a_slot_changes_hands_while_the_spare_row_of_its_former_owner_is_in_flight():
    runner, loop = make_loop(replace(LIMITS, slots=1, pages=4))
    stops = frozenset(range(LIMITS.vocab_size))
    requests = [make_request(str(s), s, prompt(3 + s % 9, salt=s), stop_ids=stops) for s in range(12)]
    for request in requests:
        loop.add(runner.expect(request))
    collector = finish_all(loop)
    for request in requests:
        assert_solo(collector, request, runner.limits)
        assert len(collector.tokens[request.id, 0]) == 1
    handovers = [
        {chunk.row.seed for chunk in late.prefills} - {row.row.seed for row in early.decodes}
        for early, late in zip(runner.plans, runner.plans[1:], strict=False)
        if early.decodes and late.prefills
    ]
    assert handovers


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.STOP, FinishReason.DEADLINE])
@pytest.mark.parametrize("after", EVERY_STATE)
def test_stop_in_every_state_frees_at_the_next_step(after, reason):
    runner, loop = make_loop(replace(LIMITS, step_tokens=8))
    request = make_request("a", 1, prompt(30), params=SamplingParams(max_tokens=6))
    loop.add(runner.expect(request))
    events = [event for _ in range(after) for event in loop.step()]
    ended = any(event.finish for event in events)
    loop.stop("a", reason)
    loop.stop("a", reason)  # twice is once
    loop.stop("b", reason)  # nobody
    if not ended:
        events += loop.step()
        assert loop.stats().free_pages == LIMITS.pages
        assert (loop.stats().running, loop.stats().waiting) == (0, 0)
    finishes = [event for event in events if event.finish]
    assert [event.finish for event in finishes] == [FinishReason.LENGTH if ended else reason]
    got = [token.token for event in events for token in event.tokens]
    assert got == solo(request, LIMITS)[0][: len(got)]
    assert finishes[0].usage.completion_tokens == len(got)
    finish_all(loop)


@pytest.mark.parametrize("after", EVERY_STATE)
def test_a_deadline_ends_in_every_state(after):
    clock = Clock()
    runner, loop = make_loop(replace(LIMITS, step_tokens=8), clock=clock)
    request = make_request("a", 1, prompt(30), params=SamplingParams(max_tokens=6, n=2), deadline=5.0)
    other = make_request("b", 2, prompt(5), deadline=6.0)
    for each in (request, other):
        loop.add(runner.expect(each))
    collector = Collector()
    for _ in range(after):
        collector.feed(loop.step())
    done = set(collector.ends)
    clock.now = 5.0
    finish_all(loop, collector)
    for key in {("a", 0), ("a", 1)} - done:
        assert collector.ends[key].finish is FinishReason.DEADLINE
    assert_solo(collector, other)


def test_stop_of_one_choice_leaves_the_others():
    runner, loop = make_loop()
    request = make_request("a", 1, prompt(9), params=SamplingParams(max_tokens=8, n=3))
    loop.add(runner.expect(request))
    collector = Collector()
    for _ in range(5):
        collector.feed(loop.step())
    loop.stop("a", FinishReason.CANCELLED, choice=1)
    loop.stop("a", FinishReason.CANCELLED, choice=7)
    finish_all(loop, collector)
    assert collector.ends["a", 1].finish is FinishReason.CANCELLED
    assert collector.result("a", 0) == solo(request, LIMITS, 0)
    assert collector.result("a", 2) == solo(request, LIMITS, 2)


def test_an_id_is_free_again_after_its_end():
    runner, loop = make_loop()
    for seed in range(2):
        request = make_request("a", seed, prompt(5))
        loop.add(runner.expect(request))
        assert_solo(finish_all(loop), request)


# ---- n > 1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 4, 5, 14])
def test_siblings_share_the_pages_of_their_prompt(length):
    request = make_request("a", 1, prompt(length), params=SamplingParams(max_tokens=4, n=4))
    _, collector = run_one(request)
    assert_solo(collector, request)
    full = (length - 1) // LIMITS.page_size * LIMITS.page_size
    assert [collector.ends["a", choice].usage.cached_tokens for choice in range(4)] == [0, full, full, full]


@pytest.mark.parametrize("after", range(6))
def test_the_next_sibling_leads_where_the_leader_is_cancelled(after):
    runner, loop = make_loop()
    request = make_request("a", 1, prompt(30), params=SamplingParams(max_tokens=4, n=3))
    loop.add(runner.expect(request))
    collector = Collector()
    for _ in range(after):
        collector.feed(loop.step())
    loop.stop("a", FinishReason.CANCELLED, choice=0)
    finish_all(loop, collector)
    assert [collector.result("a", choice) for choice in (1, 2)] == [solo(request, LIMITS, c) for c in (1, 2)]


# ---- usage, timing, statistics ---------------------------------------------------------------------------------------


def test_timing_counts_from_arrival_on_the_clock_it_was_given():
    clock = Clock()
    runner, loop = make_loop(clock=clock)
    loop.add(runner.expect(make_request("a", 1, prompt(3), params=SamplingParams(max_tokens=3), arrival=-2.0)))
    collector = Collector()
    for now in count(1):
        clock.now = float(now)
        collector.feed(loop.step())
        if not loop.busy:
            break
    end = collector.ends["a", 0]
    assert (end.timing.queue, end.timing.ttft, end.timing.itl) == (3.0, 4.0, (1.0, 1.0))
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (3, 3, 0)


def test_a_request_that_never_ran_waited_until_its_end():
    clock = Clock()
    _, loop = make_loop(clock=clock)
    loop.add(make_request("a", 1, prompt(3)))
    clock.now = 4.0
    loop.stop("a", FinishReason.CANCELLED)
    (end,) = loop.step()
    assert (end.timing.queue, end.timing.ttft, end.timing.itl) == (4.0, 0.0, ())


def test_statistics_count_tokens_and_hits_once():
    runner, loop = make_loop()
    for seed in range(2):
        loop.add(runner.expect(make_request(str(seed), seed, prompt(9), params=SamplingParams(max_tokens=3))))
        finish_all(loop)
    stats = loop.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (18, 8, 6)
    assert stats.steps == len(runner.plans)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused_with_both_numbers():
    runner, loop = make_loop()
    with pytest.raises(PromptTooLong, match=r"48 tokens; expected at most 47.*context of 48"):
        loop.add(make_request("a", 1, prompt(48)))
    fits = make_request("b", 2, prompt(47))
    loop.add(runner.expect(fits))
    assert_solo(finish_all(loop), fits)


def test_a_prompt_that_can_never_fit_the_pool_is_refused_and_the_next_is_served():
    limits = replace(LIMITS, pages=5)
    runner, loop = make_loop(limits)
    with pytest.raises(PromptTooLong, match="21 tokens; expected at most 20"):
        loop.add(make_request("a", 1, prompt(21)))
    fits = make_request("b", 2, prompt(20))
    loop.add(runner.expect(fits))
    assert_solo(finish_all(loop), fits, limits)


def test_a_full_queue_is_overloaded_until_somebody_starts():
    runner, loop = make_loop(queue=2)
    for seed in range(2):
        loop.add(runner.expect(make_request(str(seed), seed, prompt(3), params=SamplingParams(n=5, max_tokens=2))))
    with pytest.raises(Overloaded, match="2 requests are waiting") as caught:
        loop.add(make_request("c", 3, prompt(3)))
    assert caught.value.retry_after > 0
    finish_all(loop)
    loop.add(runner.expect(make_request("c", 3, prompt(3))))
    finish_all(loop)


def test_a_draining_loop_finishes_what_it_has_and_takes_no_more():
    runner, loop = make_loop()
    request = make_request("a", 1, prompt(3))
    loop.add(runner.expect(request))
    loop.drain()
    with pytest.raises(Unavailable):
        loop.add(make_request("b", 2, prompt(3)))
    assert_solo(finish_all(loop), request)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": ()}, "0 tokens"),
        ({"tokens": (1, 16)}, "prompt holds token id 16"),
        ({"tokens": (-1, 2)}, "prompt holds token id -1"),
        ({"tokens": (1,), "stop_ids": frozenset({99})}, "stop_ids holds token id 99"),
        ({"tokens": (1,), "stop_ids": frozenset(range(17))}, "17 stop ids; expected at most 16"),
        ({"tokens": (1,), "params": SamplingParams(logit_bias={16: 1.0})}, "logit_bias holds token id 16"),
        ({"tokens": (1,), "name": "taken"}, "'taken' is still running"),
    ],
)
def test_bad_requests_are_refused_by_name(fields, words):
    _, loop = make_loop()
    loop.add(make_request("taken", 1, prompt(3)))
    with pytest.raises(RequestError, match=words):
        loop.add(make_request(fields.pop("name", "new"), 2, **fields))
    assert loop.stats().waiting == 1


@pytest.mark.parametrize("wrong", [{"chunk": 6}, {"chunk": 0}, {"step_tokens": 3}, {"slots": 0}, {"context": 1}])
def test_limits_that_allow_no_plan_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        make_loop(replace(LIMITS, **wrong))


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_logits_that_are_not_finite_end_that_choice_alone_and_its_pages_are_no_hits():
    runner, loop = make_loop()
    sick, well = (make_request(name, seed, prompt(12, salt=seed)) for seed, name in enumerate(("sick", "well")))
    runner.nan_at.add((0, 0, 2))
    for request in (sick, well):
        loop.add(runner.expect(request))
    collector = finish_all(loop)
    end = collector.ends["sick", 0]
    assert end.finish is FinishReason.ERROR
    assert "not finite" in end.error
    assert collector.tokens["sick", 0] == solo(sick, LIMITS)[0][:2]
    assert_solo(collector, well)
    again = make_request("again", 3, sick.prompt)
    loop.add(runner.expect(again))
    collector = finish_all(loop)
    assert collector.ends["again", 0].usage.cached_tokens == 0
    assert_solo(collector, again)


def test_pages_of_a_preempted_choice_are_no_hits_either_once_its_logits_are_not_finite():
    runner, loop = make_loop(replace(LIMITS, pages=4, slots=2))
    first, sick = (make_request(str(s), s, prompt(4, salt=s), params=SamplingParams(max_tokens=6)) for s in range(2))
    runner.nan_at.add((1, 0, 4))  # in flight while `first` takes a page of it
    for request in (first, sick):
        loop.add(runner.expect(request))
    collector = finish_all(loop)
    assert (loop.stats().preemptions, collector.ends["1", 0].finish) == (1, FinishReason.ERROR)
    assert_solo(collector, first)
    again = make_request("again", 3, (*sick.prompt, 5))
    loop.add(runner.expect(again))
    assert finish_all(loop).ends["again", 0].usage.cached_tokens == 0


@pytest.mark.parametrize("call", ["dispatch", "fetch"])
def test_a_fault_of_the_runner_ends_every_request_and_the_loop(call):
    def fail(name, number):
        if (name, number) == (call, 3):
            raise RuntimeError("/secret/path: device lost")

    runner = ScriptedRunner(fail=fail)
    loop = EngineLoop(runner, queue=10, prefix_cache=True)
    for seed in range(6):
        loop.add(runner.expect(make_request(str(seed), seed, prompt(20), params=SamplingParams(max_tokens=6, n=2))))
    collector = Collector()
    while loop.busy:
        collector.feed(loop.step())
    assert loop.broken
    assert set(collector.ends) == {(str(seed), choice) for seed in range(6) for choice in range(2)}
    assert {end.finish for end in collector.ends.values()} == {FinishReason.ERROR}
    assert not any("secret" in end.error for end in collector.ends.values())
    assert (loop.stats().waiting, loop.stats().running) == (0, 0)
    with pytest.raises(EngineFault, match="RuntimeError") as caught:
        loop.step()
    assert "device lost" in str(caught.value.__cause__)
    with pytest.raises(EngineFault):
        loop.add(make_request("late", 99, prompt(3)))


def test_a_runner_that_returns_too_few_tokens_is_a_fault(monkeypatch):
    runner, loop = make_loop()
    loop.add(runner.expect(make_request("a", 1, prompt(3))))
    fetch = runner.fetch
    monkeypatch.setattr(runner, "fetch", lambda handle: replace(fetch(handle), prefills=()))
    events = [event for _ in range(2) for event in loop.step()]
    assert [event.finish for event in events] == [FinishReason.ERROR]
    assert loop.broken


def test_an_interrupt_while_waiting_for_the_device_loses_no_token():
    def interrupt(name, number):
        if name == "fetch" and number in (2, 5) and number not in seen:
            seen.add(number)
            raise KeyboardInterrupt

    seen = set()
    runner = ScriptedRunner(fail=interrupt)
    loop = EngineLoop(runner, queue=10, prefix_cache=True)
    requests = [make_request(str(s), s, prompt(7, salt=s), params=SamplingParams(max_tokens=26)) for s in range(4)]
    for request in requests:
        loop.add(runner.expect(request))
    collector = Collector()
    while loop.busy:
        try:
            collector.feed(loop.step())
        except KeyboardInterrupt:
            loop.check()
    assert seen == {2, 5}
    for request in requests:
        assert_solo(collector, request)


def run_interrupted(runner, loop, at, react):
    """Run what was added; the fetch of step `at` is interrupted once, and `react` called before the next step."""

    def interrupt(name, number):
        if name == "fetch" and number == at and not seen:
            seen.append(number)
            raise KeyboardInterrupt

    seen: list[int] = []
    runner.fail = interrupt
    collector = Collector()
    while loop.busy:
        try:
            collector.feed(loop.step())
        except KeyboardInterrupt:
            react()
    return collector


@pytest.mark.parametrize("at", range(12))
def test_a_victim_with_a_token_in_flight_waits_for_it_even_where_pages_are_free(at):
    runner, loop = make_loop(replace(LIMITS, pages=4, slots=2))
    first, victim = (make_request(str(s), s, prompt(4, s), params=SamplingParams(max_tokens=12)) for s in range(2))
    for request in (first, victim):
        loop.add(runner.expect(request))
    collector = run_interrupted(runner, loop, at, lambda: loop.stop("0", FinishReason.CANCELLED))
    assert_solo(collector, victim, runner.limits)


def test_a_chunk_from_before_a_preemption_publishes_nothing_of_what_came_after():
    runner, loop = make_loop(replace(LIMITS, pages=33, slots=8, context=100, step_tokens=8))
    crowd = make_request("crowd", 0, prompt(4, salt=7), params=SamplingParams(max_tokens=60, n=4))
    victim, heir = (make_request(str(seed), seed, prompt(80), params=SamplingParams(max_tokens=3)) for seed in (1, 2))
    urgent = make_request("urgent", 3, prompt(4, salt=8), priority=1)
    for request in (crowd, victim, heir):
        loop.add(runner.expect(request))

    def react():
        # The victim lost its pages with its chunk 48..55 in flight; it comes back at once, for half a chunk.
        assert loop.stats().preemptions == 1
        assert [len(chunk.tokens) for chunk in runner.plans[8].prefills] == [8]
        loop.stop("crowd", FinishReason.CANCELLED)
        loop.add(runner.expect(urgent))
        events.extend(loop.step())
        assert [(c.start, len(c.tokens)) for c in runner.plans[-1].prefills] == [(0, 4), (48, 4)]
        loop.stop("1", FinishReason.CANCELLED)

    events = []
    collector = run_interrupted(runner, loop, 8, react)
    assert any(event.request_id == "crowd" for event in events)
    assert_solo(collector, heir, runner.limits)


def test_a_loop_that_can_never_go_on_says_so():
    _, loop = make_loop()
    loop.add(make_request("a", 1, prompt(3)))
    loop._state.pool.take(LIMITS.pages)
    assert [event.finish for event in loop.step()] == [FinishReason.ERROR]
    with pytest.raises(EngineFault) as caught:
        loop.step()
    assert "none can run" in str(caught.value.__cause__)


def test_a_lost_page_is_found_when_the_loop_goes_idle():
    runner, loop = make_loop()
    loop.add(runner.expect(make_request("a", 1, prompt(3))))
    loop.step()
    loop._state.pool.take(1)
    with pytest.raises(EngineFault, match="owners"):
        loop.check()
    while loop.busy:
        loop.step()
    assert loop.broken
