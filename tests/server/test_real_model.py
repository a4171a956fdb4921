"""The gRPC door over the real engine: the checkpoint that scripts/train_tiny_model.py made."""

import gc
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

import psutil
import pytest

from jaxinfer.assembly import assemble
from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.errors import Cancelled, DeadlineExceeded
from jaxinfer.request import FinishReason, SamplingParams

PAGES = 192
ENGINE = EngineConfig(slots=16, context=256, chunk=64, deterministic=True, cache=CacheConfig(page_size=16, pages=PAGES))


@pytest.fixture(scope="module")
def default_assembly(tiny_path):
    """As people serve it: several decode buckets, unaligned chunks, preemption, pages of answers shared."""
    return assemble(str(tiny_path), replace(ENGINE, deterministic=False))


@pytest.fixture(scope="module")
def assembly(tiny_path, default_assembly):
    """Made after the other one, whose compilations would count as this one's."""
    return assemble(str(tiny_path), ENGINE)


@pytest.fixture(scope="module")
def story(tiny_path):
    return (tiny_path.parent / "text.txt").read_text()


@pytest.fixture
def served(assembly, serving):
    return serving(assembly)


def mixed(index):
    """Parameters of the `index`th request: every field is used by some."""
    return SamplingParams(
        max_tokens=8 + index,
        min_tokens=index % 5,
        temperature=(0.0, 0.7, 1.3)[index % 3],
        top_k=(0, 5)[index % 2],
        top_p=(1.0, 0.9)[index // 2 % 2],
        min_p=(0.0, 0.05)[index // 4 % 2],
        repetition_penalty=(1.0, 1.2)[index // 3 % 2],
        presence_penalty=(0.0, 0.5)[index // 5 % 2],
        frequency_penalty=(0.0, -0.5)[index // 7 % 2],
        logit_bias={10 + index: 4.0} if index % 4 == 1 else {},
        seed=index,
        n=1 + (index % 6 == 5),
        stop=("the", "\n\n") if index % 4 == 2 else (),
        stop_token_ids=(40,) if index % 8 == 3 else (),
        ignore_eos=index % 9 == 4,
        logprobs=2 if index % 5 == 0 else None,
    )


def comparable(output):
    return [(c.text, c.token_ids, c.finish, c.stop_reason, c.logprobs) for c in output.choices]


def requests_of_every_kind(story):
    """32 prompts of mixed lengths and their parameters."""
    return [story[37 * i : 37 * i + 20 + 9 * i] for i in range(32)], [mixed(i) for i in range(32)]


def test_concurrent_streams_equal_their_solo_runs_and_nothing_is_compiled(served, story):
    prompts, each = requests_of_every_kind(story)
    with served.client() as client:
        client.wait_until_ready(60)
        alone = [client.generate(prompt, params)[0] for prompt, params in zip(prompts, each, strict=True)]
        together = client.generate(prompts, each, concurrency=32)

        def joined_stream(index):
            texts = [""] * each[index].n
            for delta in client.stream(prompts[index], each[index]):
                texts[delta.choice] += delta.text
            return texts

        with ThreadPoolExecutor(32) as pool:
            streamed = list(pool.map(joined_stream, range(32)))
    for solo, crowd, texts in zip(alone, together, streamed, strict=True):
        assert comparable(solo) == comparable(crowd)
        assert [choice.text for choice in solo.choices] == texts
    assert served.wait_idle().free_pages == PAGES
    assert served.runner.compilations["serving"] == 0


def test_in_default_mode_too_concurrent_streams_have_the_tokens_of_their_solo_runs(serving, default_assembly, story):
    prompts, each = requests_of_every_kind(story)
    server = serving(default_assembly)
    with server.client() as client:
        client.wait_until_ready(60)
        compiled = server.runner.compilations["serving"]  # of the whole process: the other assembly's are among them
        alone = [client.generate(prompt, params)[0] for prompt, params in zip(prompts, each, strict=True)]
        together = client.generate(prompts, each, concurrency=32)
    for solo, crowd in zip(alone, together, strict=True):
        assert [(c.text, c.token_ids, c.finish) for c in solo.choices] == [
            (c.text, c.token_ids, c.finish) for c in crowd.choices
        ]
    assert server.wait_idle().free_pages == PAGES
    assert server.runner.compilations["serving"] == compiled


def test_500_requests_with_random_ends_leak_nothing(served, story):
    dice = random.Random(7)
    plans = [
        (
            i,
            dice.choice(("whole", "close", "abort", "deadline", "disconnect")),
            dice.randrange(len(story) - 200),
            dice.random(),
        )
        for i in range(500)
    ]
    ends = Counter()

    def run(plan):
        index, kind, start, luck = plan
        params = SamplingParams(max_tokens=4 + int(28 * luck), seed=index, n=1 + (index % 7 == 0))
        prompt = story[start : start + 20 + int(150 * luck)]
        try:
            with served.client() as client:
                timeout = 0.002 + 0.1 * luck if kind == "deadline" else None
                deltas = client.stream(prompt, params, request_id=f"soak-{index}", timeout=timeout)
                if kind in ("close", "disconnect", "abort"):
                    list(islice(deltas, int(4 * luck)))
                if kind == "close":
                    deltas.close()
                if kind == "abort":
                    client.abort(f"soak-{index}")
                if kind != "disconnect":
                    list(deltas)
            ends["quiet"] += 1
        except (Cancelled, DeadlineExceeded) as error:
            ends[type(error).__name__] += 1

    def soak(some):
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(run, some))
        assert served.wait_idle().free_pages == PAGES
        gc.collect()
        return psutil.Process().memory_info().rss

    before = soak(plans[:150])
    after = soak(plans[150:])
    assert after - before < 32 * 2**20
    assert sum(ends.values()) == 500
    assert min(ends["quiet"], ends["Cancelled"], ends["DeadlineExceeded"]) > 10, ends
    assert served.runner.compilations["serving"] == 0
    with served.client() as client:
        assert client.generate(story[:50], SamplingParams(max_tokens=4))[0].finish is FinishReason.LENGTH
