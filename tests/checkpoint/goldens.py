"""The tiny models of tests/golden: which there are, of which family, and marks for what a test proves of them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.model.families import FAMILIES

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.name for path in GOLDEN.glob("tiny_*"))
WITH_GGUF = [name for name in NAMES if (GOLDEN / name / "model.gguf").exists()]


def family(name: str) -> str:
    """The family of a golden, by its `config.json` alone: a test says what is wrong with the rest of it."""
    (architecture,) = json.loads((GOLDEN / name / "config.json").read_text())["architectures"]
    return next(row.name for row in FAMILIES if row.hf.architecture == architecture)


def proving(what: str, names: Iterable[str] = NAMES) -> list[Any]:
    """A parameter per golden, which proves `what` of its family."""
    return [pytest.param(name, marks=pytest.mark.proves(family=family(name), what=what), id=name) for name in names]
