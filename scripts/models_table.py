"""Writes the table of docs/models.md: family by family, what the tests prove of it.

A test proves something by its mark: `pytest.mark.proves(family="qwen2", what="logits")`. The tests are collected and
not run; that they pass is what continuous integration says. `--check` writes nothing and fails where the table is not
what the tests say.

    python scripts/models_table.py
    python scripts/models_table.py --check
"""

import argparse
import contextlib
import io
import os
import sys
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest

from jaxinfer.model.families import FAMILIES

ROOT = Path(__file__).parents[1]
TESTS = str(ROOT / "tests")
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table of scripts/models_table.py -->", "<!-- end of table -->"
WHAT = ("config", "names", "logits", "decode", "GGUF", "tokenizer")
Proven = dict[str, set[str]]


class Marks:
    """A pytest plugin that keeps what the collected tests prove."""

    def __init__(self) -> None:
        self.proven: Proven = defaultdict(set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Read the marks. Raises ValueError for a family or a column that there is none of."""
        for item in session.items:
            for mark in item.iter_markers("proves"):
                family, what = mark.kwargs["family"], mark.kwargs["what"]
                if what not in WHAT or family not in {row.name for row in FAMILIES}:
                    raise ValueError(f"{item.nodeid} proves {what} of {family}; the table has no such cell")
                self.proven[family].add(what)


def collect() -> Proven:
    """What is proven, by family. Raises RuntimeError where the tests cannot be collected."""
    marks = Marks()
    quiet = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        code = pytest.main([*quiet, f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}", TESTS], [marks])
    if code != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest cannot collect {TESTS}:\n{shown.getvalue()[-2000:]}")
    return marks.proven


def table(proven: Proven) -> str:
    """The table in Markdown, a row a family in the order of `FAMILIES`."""
    lines = [("family", "architecture in `config.json`", "in GGUF", *WHAT), ("---",) * 3 + (":-:",) * len(WHAT)]
    files = {row.name: row.gguf.architecture for row in FAMILIES}
    for row in FAMILIES:
        cells = ("yes" if what in proven[row.name] else "" for what in WHAT)
        lines.append((row.name, f"`{row.hf.architecture}`", f"`{files[row.name] or 'llama'}`", *cells))
    return "\n".join(f"| {' | '.join(line)} |".replace("  ", " ") for line in lines)


def with_table(page: str, rows: str) -> str:
    """The page with `rows` between its two comments. Raises ValueError where it has not one of each."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"{PAGE.name} must have one line {BEGIN} and one line {END}")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{rows}\n\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Write the table, or check it."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--check", action="store_true", help="write nothing; fail where the table is not current")
    check = options.parse_args().check
    page = PAGE.read_text()
    current = with_table(page, table(collect()))
    if check and page != current:
        print(
            f"{PAGE.relative_to(ROOT)} is not what the tests say; run python scripts/models_table.py", file=sys.stderr
        )
        return 1
    if not check:
        PAGE.write_text(current)
    return 0


if __name__ == "__main__":
    sys.exit(main())
