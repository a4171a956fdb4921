"""The command line in this process, and the model that it loads."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxinfer import LLM
from jaxinfer.cli import main


@pytest.fixture
def code() -> Callable[..., int]:
    """Runs the command line; the exit code."""

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return int(ended.value.code or 0)

    return run


@pytest.fixture
def llm(tiny_llm) -> LLM:
    return tiny_llm


@pytest.fixture
def model(llm, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags that name the model of `llm`, which is not loaded again."""

    def load(ref, engine, **options):
        assert (ref, engine) == (str(tiny_path), engine_of(llm))
        return llm

    monkeypatch.setattr(LLM, "load", load)
    return ["-m", str(tiny_path), *FLAGS]


FLAGS = ["--slots=4", "--context=96", "--chunk=32", "--page-size=16", "--pages=24"]


@pytest.fixture
def flags() -> list[str]:
    """The engine of `llm` on the command line."""
    return FLAGS


def engine_of(llm: LLM):
    """As it was asked for: dtype not yet resolved."""
    from dataclasses import replace

    return replace(llm.assembly.engine, dtype=None)
