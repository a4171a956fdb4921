"""The table of docs/models.md says what the tests prove, and no cell of it is empty."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from .conftest import SCRIPTS


@pytest.fixture(scope="module")
def made(script):
    return script("models_table")


def test_the_table_is_current():
    """In a process of its own: a test cannot collect the tests that it is one of."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "models_table.py", "--check"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout


def test_everything_is_proven_of_every_family(made):
    rows = made.PAGE.read_text().split(made.BEGIN)[1].split(made.END)[0].strip().splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [family.name for family in made.FAMILIES]
    for row in rows:
        assert row.count("yes") == len(made.WHAT), row


def marked(family, what):
    return SimpleNamespace(
        nodeid="a test", iter_markers=lambda _: [SimpleNamespace(kwargs={"family": family, "what": what})]
    )


def test_a_mark_of_no_cell_is_an_error(made):
    marks = made.Marks()
    marks.pytest_collection_finish(SimpleNamespace(items=[marked("qwen2", "names"), marked("qwen2", "GGUF")]))
    assert marks.proven == {"qwen2": {"names", "GGUF"}}
    for family, what in (("qwen2", "speed"), ("mamba", "names")):
        with pytest.raises(ValueError, match=f"a test proves {what} of {family}"):
            marks.pytest_collection_finish(SimpleNamespace(items=[marked(family, what)]))


def test_a_page_that_is_not_current_fails_the_check_and_is_written_without_it(made, monkeypatch, tmp_path, capsys):
    page = tmp_path / "models.md"
    page.write_text(f"# Models\n\n{made.BEGIN}\nold\n{made.END}\n\nprose\n")
    monkeypatch.setattr(made, "PAGE", page)
    monkeypatch.setattr(made, "ROOT", tmp_path)
    proven = {family.name: {"logits"} for family in made.FAMILIES}
    monkeypatch.setattr(made, "collect", lambda: proven)
    monkeypatch.setattr(sys, "argv", ["models_table.py", "--check"])
    assert made.main() == 1
    assert "models.md is not what the tests say" in capsys.readouterr().err
    assert "\nold\n" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["models_table.py"])
    assert made.main() == 0
    assert page.read_text().endswith(f"{made.END}\n\nprose\n")
    assert "| qwen2 | `Qwen2ForCausalLM` | `qwen2` | | | yes | | | |" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["models_table.py", "--check"])
    assert made.main() == 0


@pytest.mark.parametrize("page", ["", "{BEGIN}", "{BEGIN}{END}{END}"])
def test_a_page_without_its_two_comments_is_an_error(made, page):
    with pytest.raises(ValueError, match=r"models\.md must have one line"):
        made.with_table(page.format(BEGIN=made.BEGIN, END=made.END), "rows")
