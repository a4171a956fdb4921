"""The scripted device for every test of this folder."""

from collections.abc import Callable

import pytest

from .scripted import ScriptedRunner


@pytest.fixture
def scripted_runner() -> Callable[..., ScriptedRunner]:
    """Makes a scripted device: `scripted_runner()`, or with its own limits and faults."""
    return ScriptedRunner
