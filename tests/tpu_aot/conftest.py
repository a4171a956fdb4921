"""These tests compile for TPUs and need libtpu, which `make test-tpu-aot` brings; pytest alone says that it runs none.

They do not look for libtpu themselves: where TPU_LIBRARY_PATH is set they run, and fail where it is wrong.
"""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[1] / "scripts"
sys.path[:] = dict.fromkeys([*sys.path, str(SCRIPTS)])  # `aot` is a package beside the scripts, not an installed one

LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config, items):
    if "TPU_LIBRARY_PATH" in os.environ:
        return
    ours = [item for item in items if HERE in item.path.parents]
    items[:] = [item for item in items if HERE not in item.path.parents]
    config.hook.pytest_deselected(items=ours)
    config.stash[LEFT_OUT] = len(ours)


def pytest_terminal_summary(terminalreporter, config):
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.section("TPU", sep="=")
        terminalreporter.line(
            f"{count} tests of {HERE.name} were not run: `make test-tpu-aot` brings libtpu and runs them"
        )


@pytest.fixture(autouse=True, scope="session")
def libtpu():
    from aot import libtpu

    return libtpu.start()
