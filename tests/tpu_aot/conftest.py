"""These tests compile for TPUs and need libtpu, which `make test-tpu-aot` brings; pytest alone says that it runs none.

They do not look for libtpu themselves: where TPU_LIBRARY_PATH is set they run, and fail where it is wrong.
"""

import os
import sys
from pathlib import Path

import pytest

from ..compilers import leave_out, say_left_out

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[1] / "scripts"
sys.path[:] = dict.fromkeys([*sys.path, str(SCRIPTS)])  # `aot` is a package beside the scripts, not an installed one


def pytest_collection_modifyitems(config, items):
    if "TPU_LIBRARY_PATH" not in os.environ:
        leave_out(config, items, HERE)


def pytest_terminal_summary(terminalreporter, config):
    say_left_out(terminalreporter, config, HERE, "TPU", "`make test-tpu-aot` brings libtpu and runs them")


@pytest.fixture(autouse=True, scope="session")
def libtpu():
    from aot import libtpu

    return libtpu.start()
