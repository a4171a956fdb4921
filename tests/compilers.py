"""Folders of tests that need the compiler of an accelerator: where it is not there, pytest says that it runs none."""

from pathlib import Path

import pytest

LEFT_OUT = pytest.StashKey[dict[str, int]]()


def leave_out(config, items, folder: Path) -> None:
    """Take the tests of a folder out of what runs, and keep how many they are."""
    ours = [item for item in items if folder in item.path.parents]
    items[:] = [item for item in items if folder not in item.path.parents]
    config.hook.pytest_deselected(items=ours)
    config.stash.setdefault(LEFT_OUT, {})[folder.name] = len(ours)


def say_left_out(terminalreporter, config, folder: Path, title: str, how: str) -> None:
    """A section on the tests of a folder that were left out, if any were."""
    if count := config.stash.get(LEFT_OUT, {}).get(folder.name, 0):
        terminalreporter.section(title, sep="=")
        terminalreporter.line(f"{count} tests of {folder.name} were not run: {how}")
