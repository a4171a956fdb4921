"""Who decodes, who prefills, who is let in, who gives way. The scripted device checks each plan's form."""

from collections import Counter
from dataclasses import replace

import pytest

from jaxinfer.request import FinishReason, SamplingParams
from jaxinfer.scheduler.loop import EngineLoop
from jaxinfer.scheduler.policy import MAX_BYPASS

from .scripted import LIMITS, Collector, ScriptedRunner, assert_solo, finish_all, make_request, prompt


def make_loop(limits=LIMITS, **options):
    runner = ScriptedRunner(limits)
    return runner, EngineLoop(runner, queue=1_000, **{"prefix_cache": False, **options})


def first_steps(runner):
    """Per seed, the step of its first prefill chunk."""
    first = {}
    for index, plan in enumerate(runner.plans):
        for chunk in plan.prefills:
            first.setdefault(chunk.row.seed, index)
    return first


def test_a_long_prompt_never_stalls_a_decoding_row():
    runner, loop = make_loop(replace(LIMITS, pages=40, context=120))
    loop.add(runner.expect(make_request("short", 1, prompt(3), params=SamplingParams(max_tokens=30))))
    collector = Collector()
    for _ in range(3):
        collector.feed(loop.step())
    loop.add(runner.expect(make_request("long", 2, prompt(100))))
    finish_all(loop, collector)
    decoding = [any(row.row.seed == 1 for row in plan.decodes) for plan in runner.plans]
    assert decoding[1:30] == [True] * 29
    sizes = [sum(len(chunk.tokens) for chunk in plan.prefills) for plan in runner.plans[3:12]]
    assert sizes == [12, 12, 12, 12, 12, 12, 12, 12, 4]


def test_short_prompts_share_the_budget_of_one_step():
    runner, loop = make_loop()
    for seed in range(4):
        loop.add(runner.expect(make_request(str(seed), seed, prompt(3))))
    finish_all(loop)
    assert first_steps(runner) == dict.fromkeys(range(4), 0)


def test_higher_priority_goes_first_then_arrival():
    runner, loop = make_loop(replace(LIMITS, slots=1))
    for seed, priority in enumerate([0, 0, 5, 5, -1]):
        loop.add(runner.expect(make_request(str(seed), seed, prompt(3), priority=priority)))
    finish_all(loop)
    order = sorted(first_steps(runner).items(), key=lambda item: item[1])
    assert [seed for seed, _ in order] == [2, 3, 0, 1, 4]


def test_a_huge_request_at_the_head_does_not_hold_up_ten_tiny_ones():
    runner, loop = make_loop(replace(LIMITS, context=64))
    loop.add(runner.expect(make_request("running", 100, prompt(8), params=SamplingParams(max_tokens=40))))
    loop.step()
    requests = [make_request("huge", 0, prompt(58), params=SamplingParams(max_tokens=1))]
    requests += [make_request(str(seed), seed, prompt(2), params=SamplingParams(max_tokens=2)) for seed in range(1, 11)]
    for request in requests:
        loop.add(runner.expect(request))
    collector = finish_all(loop)
    first = first_steps(runner)
    assert all(first[seed] < first[0] for seed in range(1, 11))
    for request in requests:
        assert_solo(collector, request, runner.limits)


def test_an_endless_stream_of_tiny_requests_does_not_starve_a_huge_one():
    runner, loop = make_loop(replace(LIMITS, context=64))
    tiny = iter(range(1, 10_000))
    collector = Collector()

    def feed_tiny():
        while loop.stats().waiting < 6:
            seed = next(tiny)
            loop.add(runner.expect(make_request(str(seed), seed, prompt(5), params=SamplingParams(max_tokens=9))))

    feed_tiny()
    loop.step()
    before = next(tiny)
    huge = make_request("huge", 0, prompt(58), params=SamplingParams(max_tokens=4))
    loop.add(runner.expect(huge))
    for _ in range(200):
        feed_tiny()
        collector.feed(loop.step())
        if ("huge", 0) in collector.ends:
            break
    assert_solo(collector, huge, runner.limits)
    first = first_steps(runner)
    passed = [seed for seed, step in first.items() if seed > before and step < first[0]]
    assert 0 < len(passed) <= MAX_BYPASS


def crowd(runner, loop, count=4, **fields):
    """Requests that start with two pages each and grow to eight, in a pool of sixteen."""
    requests = [
        make_request(str(seed), seed, prompt(7, salt=seed), params=SamplingParams(max_tokens=26), **fields)
        for seed in range(count)
    ]
    for request in requests:
        loop.add(runner.expect(request))
    return requests


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_equals_alone(prefix_cache):
    runner, loop = make_loop(prefix_cache=prefix_cache)
    requests = crowd(runner, loop)
    collector = finish_all(loop)
    assert loop.stats().preemptions > 0
    for request in requests:
        assert_solo(collector, request)


def test_the_first_by_rank_is_never_preempted_and_the_last_gives_way():
    runner, loop = make_loop()
    requests = crowd(runner, loop, count=2)
    requests += [
        make_request(str(seed), seed, prompt(7, salt=seed), params=SamplingParams(max_tokens=26), priority=priority)
        for seed, priority in ((2, 1), (3, 0))
    ]
    for request in requests[2:]:
        loop.add(runner.expect(request))
    collector = finish_all(loop)
    starts = Counter(c.row.seed for plan in runner.plans for c in plan.prefills if c.start == 0)
    assert starts[2] == 1  # the highest priority
    assert starts[0] == 1  # the first to come of the others
    assert starts[3] > 1
    for request in requests:
        assert_solo(collector, request)


def test_a_token_in_flight_at_preemption_is_neither_lost_nor_doubled():
    runner, loop = make_loop(replace(LIMITS, pages=4, slots=2))
    pair = [make_request(str(s), s, prompt(4, salt=s), params=SamplingParams(max_tokens=12)) for s in range(2)]
    for request in pair:
        loop.add(runner.expect(request))
    collector, before = Collector(), None
    while loop.busy:
        events = loop.step()
        if before is None and loop.stats().preemptions:
            before = [event.request_id for event in events]
        collector.feed(events)
    assert before is not None
    assert "1" in before  # its last token came in the step that preempted it
    for request in pair:
        assert_solo(collector, request, runner.limits)


def test_a_prompt_is_not_let_in_to_be_preempted_by_its_neighbours_next_page():
    runner, loop = make_loop(replace(LIMITS, pages=4, slots=2))
    grows = make_request("0", 0, prompt(4), params=SamplingParams(max_tokens=5))
    fills = make_request("1", 1, prompt(12), params=SamplingParams(max_tokens=1))
    for request in (grows, fills):
        loop.add(runner.expect(request))
    collector = finish_all(loop)
    assert loop.stats().preemptions == 0
    for request in (grows, fills):
        assert_solo(collector, request, runner.limits)


def test_what_is_computed_again_after_preemption_is_published_again():
    runner, loop = make_loop(replace(LIMITS, pages=4, slots=2), prefix_cache=True)
    pair = [make_request(str(s), s, prompt(4, salt=s), params=SamplingParams(max_tokens=12)) for s in range(2)]
    for request in pair:
        loop.add(runner.expect(request))
    finish_all(loop)
    assert loop.stats().preemptions > 0
    again = make_request("2", 2, prompt(5, salt=1))
    loop.add(runner.expect(again))
    end = finish_all(loop).ends["2", 0]
    assert end.usage is not None
    assert end.usage.cached_tokens == 4


def test_a_victim_that_ends_on_its_token_in_flight_is_not_run_again():
    stops = frozenset(range(1, LIMITS.vocab_size))  # 0 is what is left while they are banned
    runner, loop = make_loop(replace(LIMITS, pages=4, slots=2))
    lasting = make_request("0", 0, prompt(4), params=SamplingParams(max_tokens=13))
    # Each asks for its third page while its fifth token is in flight, the first that may be a stop of this one.
    ending = make_request("1", 5, prompt(4, salt=1), stop_ids=stops, params=SamplingParams(max_tokens=12, min_tokens=4))
    for request in (lasting, ending):
        loop.add(runner.expect(request))
    collector = finish_all(loop)
    assert loop.stats().preemptions == 1
    assert collector.ends["1", 0].finish is FinishReason.STOP
    assert sum(chunk.row.seed == 5 for plan in runner.plans for chunk in plan.prefills) == 1
    for request in (lasting, ending):
        assert_solo(collector, request, runner.limits)


def test_deterministic_never_preempts():
    runner, loop = make_loop(prefix_cache=True, deterministic=True)
    requests = crowd(runner, loop)
    collector = finish_all(loop)
    assert loop.stats().preemptions == 0
    for request in requests:
        assert_solo(collector, request)


@pytest.mark.parametrize(("deterministic", "grain"), [(True, LIMITS.chunk), (False, LIMITS.page_size)])
def test_chunks_start_at_multiples_of_a_grain_hits_or_not(deterministic, grain):
    """Five prompts that share their first 13 tokens, each let in when the one before has published."""
    runner, loop = make_loop(prefix_cache=True, deterministic=deterministic)
    for seed in range(1, 6):
        tokens = (*prompt(13), *prompt(4 * seed, salt=seed))
        loop.add(runner.expect(make_request(str(seed), seed, tokens, params=SamplingParams(max_tokens=2))))
        finish_all(loop)
    starts = [chunk.start for plan in runner.plans for chunk in plan.prefills]
    assert {start % grain for start in starts} == {0}
    assert loop.stats().cached_tokens == 4 * (13 // grain * grain)


def test_deterministic_publishes_the_pages_that_prefill_wrote_alone():
    for deterministic, pages in ((True, 1), (False, 3)):
        runner, loop = make_loop(prefix_cache=True, deterministic=deterministic)
        loop.add(runner.expect(make_request("a", 1, prompt(7), params=SamplingParams(max_tokens=6))))
        finish_all(loop)
        assert loop.stats().cached_pages == pages


def test_seats_carry_the_history_of_those_that_need_it_after_preemption_too():
    runner, loop = make_loop()
    params = SamplingParams(max_tokens=26, presence_penalty=0.5, logit_bias={3: 1.0})
    requests = [make_request(str(seed), seed, prompt(7, salt=seed), params=params) for seed in range(4)]
    plain = make_request("plain", 9, prompt(5))
    for request in (*requests, plain):
        loop.add(runner.expect(request))
    collector = finish_all(loop)
    seats = [seat for plan in runner.plans for seat in plan.seats]
    sampling = [c for plan in runner.plans for c in plan.prefills if c.samples and c.row.seed != 9]
    assert len(seats) == len(sampling) > 4
    assert any(seat.output for seat in seats)
    assert all(seat.logit_bias == {3: 1.0} for seat in seats)
    for request in (*requests, plain):
        assert_solo(collector, request)
