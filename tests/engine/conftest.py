"""Runners, compiled once for all tests of this folder; tests leave nothing in them that another one reads."""

import pytest

from jaxinfer.engine.runner import EngineRunner

from .driver import make_runner


@pytest.fixture(scope="session")
def runner() -> EngineRunner:
    """One decode bucket of 4 rows and one prefill bucket of 32 tokens, so that equal rows must be equal bit by bit."""
    return make_runner()
