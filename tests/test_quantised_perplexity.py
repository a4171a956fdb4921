"""What quantising costs in perplexity, on real models and a real text."""

from pathlib import Path
from typing import Any

import pytest

from jaxinfer.checkpoint.load import load
from jaxinfer.perplexity import perplexity

TEXT = (Path(__file__).parent / "data" / "eval" / "alice.txt").read_text(encoding="utf-8")
TOKENS, CONTEXT = 500, 256


def measure(path: Path, quantize: Any) -> float:
    return perplexity(
        load(str(path), dtype="float32", quantize=quantize), TEXT, context=CONTEXT, tokens=TOKENS
    ).perplexity


@pytest.fixture(scope="module")
def smollm2(demo_path: Path) -> float:
    return measure(demo_path, None)


@pytest.mark.parametrize(("quantize", "most"), [("int8", 0.01), ("int4", 0.08), ("stored", 1e-4)])
def test_smollm2(demo_path: Path, smollm2: float, quantize: str, most: float):
    found = measure(demo_path, quantize)
    assert found != smollm2
    assert found == pytest.approx(smollm2, rel=most)


@pytest.fixture(scope="module")
def gemma3(gemma_path: Path) -> float:
    return measure(gemma_path, None)


@pytest.mark.parametrize(("quantize", "most"), [("int8", 0.01), ("int4", 0.08)])
def test_gemma3(gemma_path: Path, gemma3: float, quantize: str, most: float):
    found = measure(gemma_path, quantize)
    assert found != gemma3
    assert found == pytest.approx(gemma3, rel=most)
