"""The tiny checkpoint through the Python door: it says its text, whole or while it is made, and then it stops."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxinfer import LLM, CacheConfig, EngineConfig, FinishReason, SamplingParams

ENGINE = EngineConfig(slots=4, chunk=64, cache=CacheConfig(page_size=16, pages=128))
GREEDY = SamplingParams(max_tokens=1_000, temperature=0.0)


@pytest.fixture(scope="module")
def llm(tiny_path: Path):
    return LLM.load(str(tiny_path), ENGINE)


@pytest.fixture(scope="module")
def text(tiny_path: Path) -> str:
    return (tiny_path.parent / "text.txt").read_text().strip()


def test_it_recites_the_shipped_text(llm: LLM, text: str):
    prompt = text[: text.index("\n")]
    (output,) = llm.generate([prompt], GREEDY)
    assert prompt + output.text == text
    assert output.finish is FinishReason.STOP


def test_the_stream_joined_is_the_same_text(llm: LLM, text: str):
    """Korean, accents and emoji are spelled in bytes here: no delta may hold half a character."""
    prompt = text[: text.index("\n")]
    deltas = list(llm.stream(prompt, GREEDY))
    assert prompt + "".join(delta.text for delta in deltas) == text
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert len(deltas) > 100


def test_every_prefix_goes_on_the_same_way(llm: LLM, text: str):
    """Prompts that end at different lines, batched: more prompts than slots, some longer than a chunk."""
    ends = [i for i, character in enumerate(text) if character == "\n" and text[i - 1] != "\n"][2:]
    outputs = llm.generate([text[:end] for end in ends], GREEDY)
    assert [text[:end] + output.text for end, output in zip(ends, outputs, strict=True)] == [text] * len(ends)


def test_it_stops_before_a_stop_string(llm: LLM, text: str):
    stop = "강은"
    (output,) = llm.generate(
        [text[: text.index("There were guests")]], SamplingParams(1_000, temperature=0.0, stop=(stop,))
    )
    assert output.text == text[text.index("There were guests") : text.index(stop)]
    assert output.choices[0].stop_reason == stop


def test_int8_keys_and_values_recite_it_too(tiny_path: Path, text: str):
    """From the first line, with nothing in the cache, and again from the pages that the first time left."""
    llm = LLM.load(str(tiny_path), replace(ENGINE, cache=replace(ENGINE.cache, dtype="int8")), progress=False)
    prompt = text[: text.index("There were guests")]
    (first,), (again,) = (llm.generate([prompt], GREEDY) for _ in range(2))
    assert (first.usage.cached_tokens, again.usage.cached_tokens > 0) == (0, True)
    assert prompt + first.text == prompt + again.text == text
    assert again.token_ids == first.token_ids
    assert llm.assembly.runner.compilations["serving"] == 0
