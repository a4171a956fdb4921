"""The house rules that a reviewer should not have to repeat: read from the source with `ast`, nothing imported.

Each rule is a function from source to faults, and each is first shown a source that breaks it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYER_0 = frozenset({"errors", "request", "plan", "config", "arrays"})
PARTS = LAYER_0 | {"progress", "roofline", "text", "model", "pallas_kernels"}
DRIVEN = LAYER_0 | {"text", "scheduler", "stream", "output"}
WHOLE = PARTS | DRIVEN | {"engine", "checkpoint", "driver"}
LIBRARY = WHOLE | {"assembly", "llm", "batch", "bench", "perplexity", "doctor"}

SEES: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "arrays": frozenset(),
    "progress": frozenset(),
    "request": frozenset({"errors"}),
    "plan": frozenset({"request"}),
    "config": frozenset({"errors"}),
    "roofline": LAYER_0,
    "text": LAYER_0,
    "model": LAYER_0,
    "pallas_kernels": frozenset(),
    "engine": PARTS,
    "checkpoint": PARTS,
    "scheduler": frozenset({"errors", "request", "plan", "config"}),
    "output": LAYER_0,
    "stream": LAYER_0 | {"text"},
    "driver": DRIVEN,
    "assembly": WHOLE,
    "llm": WHOLE | {"assembly"},
    "batch": WHOLE | {"assembly", "llm"},
    "bench": WHOLE | {"assembly", "llm"},
    "perplexity": PARTS | {"engine", "checkpoint"},
    "doctor": PARTS | {"engine", "checkpoint", "bench"},
    "jaxinfer_server": LIBRARY | {"__init__"},
    "cli": LIBRARY | {"__init__"},
    "__init__": LIBRARY,
    "__main__": LIBRARY | {"cli"},
}
"""Room -> the rooms that it may import besides itself. A new room needs a row here, and a reason."""

LATE = {"cli": frozenset({"jaxinfer_server"})}
"""Imports allowed inside a function only, so that the library never needs a server."""

FOREIGN: dict[str, frozenset[str]] = {
    "asyncio": frozenset({"jaxinfer_server"}),
    "grpc": frozenset({"jaxinfer_server"}),
    "jax": frozenset(
        {"arrays", "model", "pallas_kernels", "engine", "checkpoint", "assembly", "bench", "perplexity", "doctor"}
    ),
    "flax": frozenset({"model", "engine", "checkpoint", "doctor"}),
    "torch": frozenset({"doctor"}),
    "transformers": frozenset({"doctor"}),
    "pickle": frozenset(),
}
"""Modules of others that only some rooms may import."""

REFERENCES = ("torch", "transformers")

PACKAGES = {"jaxinfer": ROOT / "jaxinfer", "pallas_kernels": ROOT / "pallas_kernels"}
SERVER = ROOT / "server" / "jaxinfer_server"
SOURCES = sorted(
    path
    for folder in (*PACKAGES.values(), SERVER, ROOT / "scripts", ROOT / "tests")
    for path in folder.rglob("*.py")
    if "_pb2" not in path.name
)
SHIPPED = [path for path in SOURCES if ROOT / "tests" not in path.parents]
INSTALLED = [path for path in SHIPPED if ROOT / "scripts" not in path.parents]
TEXTS = sorted(
    path
    for pattern in ("*.py", "*.md", "*.toml", "*.txt", "*.proto", "Makefile", ".ci/run")
    for path in ROOT.rglob(pattern)
    if not set(path.relative_to(ROOT).parts[:-1]) & {".venv", ".git", "build", "dist", ".pytest_cache"}
)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room(module: str) -> str | None:
    """The room of one of our modules (`jaxinfer.text.chat` -> `text`), None for somebody else's."""
    top, _, rest = module.partition(".")
    if top == "jaxinfer":
        return rest.partition(".")[0] or "__init__"
    return top if top in ("pallas_kernels", "jaxinfer_server") else None


def module_name(path: Path) -> str:
    base = SERVER.parent if SERVER in path.parents else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts)


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Every imported module, and whether that happens at the top of the file."""
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import from the package's full name"
            for alias in node.names:
                named_module = f"{node.module}.{alias.name}" if node.module in ("jaxinfer", "jax") else node.module
                yield str(named_module), id(node) in top


def own_room(name: str) -> str | None:
    """As `room`; `from jaxinfer import LLM` reads the front page, `from jaxinfer import request` the room."""
    found = room(name)
    return found if found is None or found in SEES else "__init__"


def layer_faults(source: str, here: str) -> list[str]:
    faults = []
    for name, at_top in imports(ast.parse(source)):
        there = own_room(name)
        if there is None:
            allowed = FOREIGN.get(name.partition(".")[0])
            if allowed is not None and here not in allowed:
                faults.append(f"{here} imports {name}")
        elif there != here and there not in SEES[here] and (at_top or there not in LATE.get(here, ())):
            faults.append(f"{here} imports {there}")
    return faults


def annotation_faults(source: str) -> list[str]:
    """Public functions, and methods of public classes, that leave a parameter or the result unannotated."""
    faults = []
    for function, method in public_functions(ast.parse(source)):
        spec = function.args
        parameters = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
        static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)
        skipped = 1 if method and not static else 0
        bare = [p.arg for p in parameters[skipped:] if p is not None and p.annotation is None]
        if bare:
            faults.append(f"line {function.lineno}: {function.name}({', '.join(bare)})")
        if function.returns is None:
            faults.append(f"line {function.lineno}: {function.name} has no result type")
    return faults


def public_functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node, False
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            methods = [line for line in node.body if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef)]
            yield from ((m, True) for m in methods if m.name == "__init__" or not m.name.startswith("_"))


def swallow_faults(source: str) -> list[str]:
    """`except` without a type, with nothing in its body, and `suppress` of everything."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                faults.append(f"line {node.lineno}: except without a type")
            if all(isinstance(line, ast.Pass) or is_constant(line) for line in node.body):
                faults.append(f"line {node.lineno}: an exception is swallowed")
        elif isinstance(node, ast.Call) and name_of(node.func) == "suppress":
            wide = [name_of(argument) for argument in node.args if name_of(argument) in ("Exception", "BaseException")]
            faults += [f"line {node.lineno}: every {name} is suppressed" for name in wide]
    return faults


def is_constant(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def escape_faults(source: str) -> list[str]:
    """Tests that may pass without running: skips and expected failures."""
    marks = {"skip", "skipif", "xfail", "importorskip"}
    return [
        f"line {node.lineno}: {node.attr}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in marks
    ]


MARKER = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")))
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(home|root|work|Users|opt|mnt)/\w")
INDEX_OPTION = re.compile("--(extra-)?" + "index-url|--find" + "-links|--trusted" + "-host")


def text_faults(text: str) -> list[str]:
    """Words that a repository should not hold: notes to self, paths of one machine, the host of an index."""
    return [
        f"line {number}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), 1)
        if any(pattern.search(line) for pattern in (MARKER, MACHINE_PATH, INDEX_OPTION))
    ]


@pytest.mark.parametrize("path", INSTALLED, ids=named)
def test_imports_run_one_way(path: Path):
    here = room(module_name(path))
    assert here in SEES, f"{named(path)} is a new room: give it a row in SEES"
    assert layer_faults(path.read_text(), here) == []


@pytest.mark.parametrize("path", INSTALLED, ids=named)
def test_the_reference_is_imported_by_one_file_of_the_doctor_inside_functions(path: Path):
    found = [at_top for name, at_top in imports(ast.parse(path.read_text())) if name.partition(".")[0] in REFERENCES]
    assert not any(found)
    assert bool(found) == (named(path) == "jaxinfer/doctor/reference.py")


def test_the_layer_table_has_no_circle():
    rooms = dict(SEES)
    while rooms:
        free = [name for name, seen in rooms.items() if not seen & rooms.keys()]
        assert free, f"these rooms see each other in a circle: {sorted(rooms)}"
        for name in free:
            del rooms[name]


@pytest.mark.parametrize(
    ("here", "line"),
    [
        ("scheduler", "import jax"),
        ("scheduler", "from jaxinfer.engine.steps import decode_step"),
        ("scheduler", "def f():\n    import jax.numpy as jnp"),
        ("model", "from jaxinfer.engine import ops"),
        ("model", "import pallas_kernels.dispatch"),
        ("pallas_kernels", "from jaxinfer.arrays import Pages"),
        ("llm", "import asyncio"),
        ("cli", "from jaxinfer_server.launch import serve"),
        ("text", "from jaxinfer import LLM"),
        ("engine", "from jaxinfer import scheduler"),
        ("engine", "import torch"),
    ],
)
def test_a_broken_layer_is_seen(here: str, line: str):
    assert layer_faults(line, here)


def test_an_allowed_import_is_let_through():
    assert layer_faults("import jax\nfrom jaxinfer import request", "engine") == []
    assert layer_faults("def serve():\n    import jaxinfer_server.launch", "cli") == []


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_a_file_holds_one_idea(path: Path):
    folder = path.relative_to(ROOT).parts[0]
    limit = {"pallas_kernels": 500, "tests": 400}.get(folder, 300)
    lines = sum(bool(line.strip()) for line in path.read_text().splitlines())  # blank ones are free
    assert lines <= limit, f"{named(path)} has {lines} lines, {limit} at most: look for the second idea in it"


@pytest.mark.parametrize("path", SHIPPED, ids=named)
def test_every_public_function_is_annotated(path: Path):
    assert annotation_faults(path.read_text()) == []


def test_a_missing_annotation_is_seen():
    assert len(annotation_faults("def f(x): ...")) == 2
    assert len(annotation_faults("class A:\n    def f(self, x: int, *rest) -> None: ...")) == 1
    assert annotation_faults("class A:\n    def f(self, x: int) -> None: ...\ndef _g(x): ...") == []


@pytest.mark.parametrize("path", SHIPPED, ids=named)
def test_no_exception_is_swallowed(path: Path):
    assert swallow_faults(path.read_text()) == []


def test_a_swallowed_exception_is_seen():
    assert len(swallow_faults("try:\n    f()\nexcept ValueError:\n    pass")) == 1
    assert len(swallow_faults("try:\n    f()\nexcept:\n    ...")) == 2
    assert len(swallow_faults("with contextlib.suppress(Exception):\n    f()")) == 1
    assert swallow_faults("try:\n    f()\nexcept ValueError:\n    g()") == []


@pytest.mark.parametrize("path", [path for path in SOURCES if path not in SHIPPED], ids=named)
def test_no_test_escapes(path: Path):
    assert escape_faults(path.read_text()) == []


def test_an_escape_is_seen():
    assert escape_faults("@pytest.mark.skipif(True)\ndef test(): ...")


@pytest.mark.parametrize("path", TEXTS, ids=named)
def test_texts_are_clean(path: Path):
    assert text_faults(path.read_text()) == []


def test_an_unclean_text_is_seen():
    assert text_faults("# " + "TO" + "DO later")
    assert text_faults("open('/" + "home/ann/model')")
    assert text_faults("pip install --" + "index-url x")
    assert text_faults("see https://example.org/work/x, src/home/x and ./opt/y") == []


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_annotations_stay_real(path: Path):
    """Postponed annotations are strings, and jaxtyping's checks of dataclass fields then vanish."""
    assert not re.search(r"^from __future__ import annotations", path.read_text(), re.MULTILINE)


def test_the_source_was_found():
    assert len(SHIPPED) > 20
    assert ROOT / "README.md" in TEXTS
