"""Real models through the public API against transformers: 20 prompts, 64 greedy ids each (scripts/make_goldens.py)."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, CacheConfig, EngineConfig, SamplingParams

GOLDEN = Path(__file__).parent / "golden"
TIE = 1e-4
STEPS = 64
# One prefill and one decode shape: compiling is most of this test's time.
ENGINE = EngineConfig(
    slots=20, context=1024, chunk=64, dtype="float32", deterministic=True, cache=CacheConfig(page_size=64, pages=100)
)
PARAMS = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)


def compared(prompt: dict[str, Any]) -> int:
    """Steps up to the first at which the two best logits are tied: from there on either continuation is right."""
    return next((step for step, gap in enumerate(prompt["gaps"]) if gap < TIE), STEPS)


def read(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["prompts"]


def test_a_tie_ends_the_comparison():
    assert compared({"gaps": [1.0, 2e-4, 0.9e-4, 1.0]}) == 2
    assert compared({"gaps": [1.0] * STEPS}) == STEPS


@pytest.mark.parametrize(("name", "path"), [("smollm2", "demo_path"), ("gemma3_270m", "gemma_path")])
def test_greedy_ids_equal_those_of_transformers(name: str, path: str, request: pytest.FixtureRequest):
    prompts = read(name)
    assert len(prompts) == 20
    assert sum(map(compared, prompts)) > 0.9 * 20 * STEPS, "too many ties to prove anything"
    llm = LLM.load(str(request.getfixturevalue(path)), ENGINE, progress=False)
    assert [llm.assembly.tokenizer.encode(prompt["text"], special=True) for prompt in prompts] == [
        prompt["ids"] for prompt in prompts
    ]
    outputs = llm.generate([prompt["ids"] for prompt in prompts], PARAMS)
    for prompt, output in zip(prompts, outputs, strict=True):
        steps = compared(prompt)
        if steps < STEPS:
            print(f"{prompt['text'][:40]!r}: a true tie at step {steps}; what follows is not compared")
        assert list(output.token_ids[:steps]) == prompt["continuation"][:steps], prompt["text"][:80]
        assert len(output.token_ids) == STEPS
