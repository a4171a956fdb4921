"""The engine end to end on models with experts and with a latent for a cache: what is promised holds for them too."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from jaxinfer import LLM, CacheConfig, EngineConfig, SamplingParams
from jaxinfer.config import MeshConfig

GOLDEN = Path(__file__).parent / "golden"
ENGINE = EngineConfig(slots=4, chunk=32, deterministic=True, cache=CacheConfig(page_size=32, pages=16))
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPTS = [[(7 * i * i + seed) % 259 for i in range(length)] for seed, length in ((3, 70), (5, 9), (11, 33))]
"""Longer than two chunks, shorter than one, and a token more than one."""


@cache
def llm_of(name: str, devices: int = 1) -> LLM:
    engine = replace(ENGINE, mesh=MeshConfig(tensor=devices))
    return LLM.load(str(GOLDEN / name), engine, progress=False)


@pytest.fixture(params=["tiny_qwen3_moe", "tiny_deepseek_v3"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return llm_of(request.param)


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY)]


def test_a_batch_gives_each_prompt_what_it_gets_alone(llm: LLM):
    alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
    assert len(set(alone)) == len(PROMPTS)
    assert answers(llm, PROMPTS) == alone
    assert answers(llm, PROMPTS[::-1]) == alone[::-1]


def test_a_prefix_hit_gives_what_no_hit_gives(llm: LLM):
    prompt = [token + 1 for token in PROMPTS[0]]
    cold, warm = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 64)
    assert warm.token_ids == cold.token_ids


def test_two_devices_answer_as_one():
    """No token of this golden has two experts near a tie, so rounding cannot choose another one."""
    assert answers(llm_of("tiny_deepseek_v3", devices=2), PROMPTS) == answers(llm_of("tiny_deepseek_v3"), PROMPTS)
