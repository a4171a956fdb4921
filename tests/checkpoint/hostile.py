"""How a checkpoint is damaged, and what must come of it: a model or an error of ours, at the price of its own size."""

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from jaxinfer.checkpoint.load import load
from jaxinfer.errors import CheckpointError, ConfigError

Route = tuple[str | int, ...]
JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    2**31 - 1,
    2**31,
    2**63,
    2**70,
    0.5,
    1e308,
    -1e-300,
    "",
    "x",
    "\ud800",
    "9" * 40,
    [],
    [0],
    [None, "x"],
    {},
    {"a": 1},
    {"type": "x"},
    [[[]]],
]
"""Values of every JSON type, sizes that overflow 32 and 64 bits, a lone surrogate. Not NaN: Python alone spells it."""
HUGE = (2**31, 2**32 + 5, 2**61, 2**63, 2**64 - 1)
FIXED_COST = 30_000_000
"""Bytes that tracing a model's shapes, its tokenizer and the allocator's habits take, however small the files are."""


def load_or_refuse(ref: Path) -> None:
    """Loads `ref`, which may be a model or end in one of the loader's errors, but not take much more than its size."""
    files = [ref] if ref.is_file() else list(ref.iterdir())
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
    with contextlib.suppress(CheckpointError, ConfigError):
        load(str(ref), dtype="float32")
    assert memory("VmHWM") - before < FIXED_COST + 20 * sum(path.stat().st_size for path in files)


def memory(field: str) -> int:
    """Bytes that this process has (VmRSS) or has had at its peak (VmHWM)."""
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def routes(value: Any, at: Route = ()) -> Iterator[Route]:
    """Where every value inside a JSON value lies, the whole first; of long lists and objects the first and last few."""
    yield at
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, inner in items if len(items) <= 40 else items[:3] + items[-3:]:
        yield from routes(inner, (*at, key))


def replaced(value: Any, route: Route, junk: Any) -> Any:
    """`value` with `junk` at `route`."""
    if not route:
        return junk
    whole = copy.deepcopy(value)
    inner = whole
    for key in route[:-1]:
        inner = inner[key]
    inner[route[-1]] = junk
    return whole


def damaged_json(text: str) -> st.SearchStrategy[str]:
    """The JSON document with one or two of its values replaced."""
    value = json.loads(text)
    spots = st.sampled_from(list(routes(value)))

    def damage(changes: list[tuple[Route, Any]]) -> str:
        found = value
        for route, junk in changes:
            if route in set(routes(found)):
                found = replaced(found, route, junk)
        return json.dumps(found)

    return st.lists(st.tuples(spots, st.sampled_from(JUNK)), min_size=1, max_size=2).map(damage)


@st.composite
def damaged_bytes(draw: st.DrawFn, raw: bytes, end: int) -> bytes:
    """The file with something done to its first `end` bytes: overwritten, cut out, doubled, moved, or cut off."""
    at = draw(st.integers(0, end - 1))
    size = draw(st.integers(1, 64))
    match draw(st.sampled_from(["flip", "patch", "huge", "drop", "double", "splice", "cut"])):
        case "flip":
            return raw[:at] + bytes([raw[at] ^ 1 << draw(st.integers(0, 7))]) + raw[at + 1 :]
        case "patch":
            patch = draw(st.binary(min_size=1, max_size=12))
            return raw[:at] + patch + raw[at + len(patch) :]
        case "huge":
            patch = draw(st.sampled_from(HUGE)).to_bytes(8, "little")
            return raw[:at] + patch + raw[at + 8 :]
        case "drop":
            return raw[:at] + raw[at + size :]
        case "double":
            return raw[: at + size] + raw[at:]
        case "splice":
            other = draw(st.integers(0, end - 1))
            return raw[:at] + raw[other : other + size] + raw[at + size :]
        case _:
            return raw[:at]
