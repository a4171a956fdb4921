"""Prefix sharing: what is a hit, when it becomes one, and when it ends."""

import pytest

from jaxinfer.request import SamplingParams
from jaxinfer.scheduler.loop import EngineLoop
from jaxinfer.scheduler.prefix_cache import PrefixCache, page_name, root_name

from .scripted import LIMITS, Collector, ScriptedRunner, assert_solo, finish_all, make_request, prompt

ONE = SamplingParams(max_tokens=1)


def cached(requests, *, prefix_cache=True):
    """cached_tokens of each request, run one after the other."""
    runner = ScriptedRunner()
    loop = EngineLoop(runner, queue=9, prefix_cache=prefix_cache)
    collector = Collector()
    for request in requests:
        loop.add(runner.expect(request))
        finish_all(loop, collector)
        assert_solo(collector, request)
    return [collector.ends[request.id, 0].usage.cached_tokens for request in requests]


def test_a_name_depends_on_salt_parent_and_tokens():
    tokens = [1, 2, 3, 4]
    names = {
        page_name(root_name(""), tokens),
        page_name(root_name("a"), tokens),
        page_name(page_name(root_name(""), tokens), tokens),
        page_name(root_name(""), [1, 2, 3, 5]),
        page_name(root_name(""), [1, 2, 34]),
    }
    assert len(names) == 5
    assert page_name(root_name("a"), tokens) == page_name(root_name("a"), tuple(tokens))


def test_match_ends_at_the_first_page_that_is_missing():
    cache = PrefixCache(enabled=True)
    for name, page in ((b"a", 5), (b"c", 7)):
        cache.publish(name, page)
    assert cache.match([b"a", b"b", b"c"]) == [5]


def test_the_first_page_of_a_name_stays_and_a_forgotten_one_is_no_hit():
    cache = PrefixCache(enabled=True)
    cache.publish(b"a", 1)
    cache.publish(b"a", 2)
    assert cache.match([b"a"]) == [1]
    assert 2 not in cache
    cache.forget(2)
    cache.forget(1)
    assert cache.match([b"a"]) == []
    cache.check()


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 12, 13])
def test_a_repeated_prompt_hits_its_full_pages_but_never_its_last_token(length):
    again = [make_request(name, seed, prompt(length), params=ONE) for seed, name in enumerate("ab")]
    assert cached(again) == [0, (length - 1) // LIMITS.page_size * LIMITS.page_size]


def test_prompts_that_diverge_inside_a_page_share_only_the_pages_before():
    first = prompt(12)
    other = (*first[:6], (first[6] + 1) % LIMITS.vocab_size, *first[7:])
    assert cached([make_request("a", 1, first), make_request("b", 2, other)]) == [0, 4]


def test_salts_never_share():
    salts = ["", "x", "y", "x"]
    requests = [make_request(str(i), i, prompt(12), params=ONE, cache_salt=salt) for i, salt in enumerate(salts)]
    assert cached(requests) == [0, 0, 0, 8]


def test_without_the_cache_nothing_is_shared():
    requests = [make_request(str(i), i, prompt(12), params=ONE) for i in range(3)]
    assert cached(requests, prefix_cache=False) == [0, 0, 0]


def test_the_answer_is_cached_for_the_next_turn():
    first = make_request("a", 1, prompt(6), params=SamplingParams(max_tokens=8))
    runner = ScriptedRunner()
    loop = EngineLoop(runner, queue=9, prefix_cache=True)
    loop.add(runner.expect(first))
    answer, _ = finish_all(loop).result("a")
    second = make_request("b", 2, (*first.prompt, *answer, 1, 2), params=ONE)
    loop.add(runner.expect(second))
    end = finish_all(loop).ends["b", 0]
    assert end.usage.cached_tokens == 12  # of the 14 tokens the last was never written


def test_a_page_is_no_hit_before_the_step_that_wrote_it_is_fetched():
    runner = ScriptedRunner()
    loop = EngineLoop(runner, queue=9, prefix_cache=True)
    requests = [make_request(str(i), i, prompt(8), params=ONE) for i in range(3)]
    collector = Collector()
    for request in requests:
        loop.add(runner.expect(request))
        collector.feed(loop.step())  # the step of the request before is fetched after this plan was made
    finish_all(loop, collector)
    assert [collector.ends[r.id, 0].usage.cached_tokens for r in requests] == [0, 0, 4]


def test_eviction_takes_the_tail_of_a_prefix_before_its_head():
    long, other = prompt(40), prompt(28, salt=9)
    requests = [
        make_request("a", 1, long, params=ONE),
        make_request("b", 2, other, params=ONE),  # 10 of 16 pages are kept: one of them has to go
        make_request("c", 3, long, params=ONE),
    ]
    assert cached(requests) == [0, 0, 36]
