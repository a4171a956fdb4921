"""These tests compile for an H200 and need CUDA's compiler, which `make test-gpu-aot` brings and puts on the path.

Where it is not on the path, pytest says that it runs none of them.
"""

import sys
from pathlib import Path

import pytest

from ..compilers import leave_out, say_left_out

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[1] / "scripts"
sys.path[:] = dict.fromkeys([*sys.path, str(SCRIPTS)])  # `aot` is a package beside the scripts, not an installed one

from aot import cuda  # noqa: E402


def pytest_collection_modifyitems(config, items):
    try:
        cuda.toolkit()
    except cuda.NoCudaError:
        leave_out(config, items, HERE)


def pytest_terminal_summary(terminalreporter, config):
    say_left_out(terminalreporter, config, HERE, "GPU", "`make test-gpu-aot` brings the compiler and runs them")


@pytest.fixture(autouse=True, scope="session")
def compiler():
    return cuda.start()
