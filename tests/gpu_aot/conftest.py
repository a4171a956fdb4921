"""These tests compile for an H200 and need CUDA's compiler, which `make test-gpu-aot` brings and puts on the path.

Where it is not on the path, pytest says that it runs none of them.
"""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[1] / "scripts"
sys.path[:] = dict.fromkeys([*sys.path, str(SCRIPTS)])  # `aot` is a package beside the scripts, not an installed one

from aot import cuda  # noqa: E402

LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config, items):
    try:
        cuda.toolkit()
    except cuda.NoCudaError:
        ours = [item for item in items if HERE in item.path.parents]
        items[:] = [item for item in items if HERE not in item.path.parents]
        config.hook.pytest_deselected(items=ours)
        config.stash[LEFT_OUT] = len(ours)


def pytest_terminal_summary(terminalreporter, config):
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.section("GPU", sep="=")
        terminalreporter.line(
            f"{count} tests of {HERE.name} were not run: `make test-gpu-aot` brings the compiler and runs them"
        )


@pytest.fixture(autouse=True, scope="session")
def compiler():
    return cuda.start()
