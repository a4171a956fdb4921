"""Measure jaxinfer beside Hugging Face transformers: same weights, same machine, one run, as ratios.

Each side lives in a process of its own with the same CPUs; they take turns, so that a slow minute of the machine hits
both. Ours goes through `EngineLoop` with everything that serving does to a step (planning, packing, sampling, the copy
of the tokens to the host), prefix cache off. Theirs is the model's forward pass with its default cache and an argmax.

    pip install -e '.[bench]'
    python scripts/bench_peers.py > table.md
"""

import json
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from peers import Prompts, Side, sides
from tqdm import tqdm


@dataclass(frozen=True)
class Case:
    """One row of the table: `steps` decode steps of `rows` sequences, or with 0 steps a prefill of one prompt."""

    name: str
    rows: int
    context: int
    steps: int
    wanted: float

    def prompts(self, seed: int) -> Prompts:
        """Ids that no end-of-text id is among; different prompts per row and seed."""
        return np.random.default_rng(seed).integers(100, 40_000, (self.rows, self.context)).tolist()


CASES = (
    Case("prefill, 512 tokens", 1, 512, 0, 1.3),
    Case("decode, 1 stream, context 128", 1, 128, 32, 2.5),
    Case("decode, 8 streams, context 128", 8, 128, 24, 1.5),
    Case("decode, 32 streams, context 128", 32, 128, 16, 1.0),
    Case("decode, 32 streams, context 1,024", 32, 1_024, 8, 1.0),
)


@dataclass(frozen=True)
class Row:
    """A case measured: median seconds a step (or of the prefill) of both sides, and whether their tokens agreed."""

    case: Case
    ours: float
    theirs: float
    same_first_token: bool

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.theirs / self.ours


def measure(case: Case, both: tuple[Side, Side], rounds: int, bar: tqdm) -> Row:
    """The case on both sides in turns. Prefill: two prompts a turn, each new; decode: `case.steps` steps a turn."""
    times: tuple[list[float], list[float]] = ([], [])
    firsts: tuple[list[int], list[int]] = ([], [])
    if case.steps:
        for side, found in zip(both, firsts, strict=True):
            found.extend(side.call("fill", case.prompts(0))[:1])
    for seed in range(rounds):
        for side, spent, found in zip(both, times, firsts, strict=True):
            if case.steps:
                spent += side.call("decode", case.steps)
            else:
                seconds, first = side.call("prefill", case.prompts(seed)[0])
                spent.append(seconds)
                found.append(first)
        bar.update()
    return Row(case, median(times[0]), median(times[1]), firsts[0] == firsts[1])


def table(rows: list[Row]) -> str:
    """Markdown, as docs/performance.md shows it."""
    lines = [
        "| | jaxinfer | | transformers | | ratio | wanted |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *(
            f"| {row.case.name} | {row.ours * 1e3:,.1f} ms | {tokens(row.case) / row.ours:,.0f} tok/s "
            f"| {row.theirs * 1e3:,.1f} ms | {tokens(row.case) / row.theirs:,.0f} tok/s "
            f"| **{row.ratio:.2f}** | {row.case.wanted} |"
            for row in rows
        ),
    ]
    agreed = sum(row.same_first_token for row in rows)
    lines += ["", f"First tokens of both sides are equal in {agreed} of {len(rows)} rows."]
    return "\n".join(lines)


def tokens(case: Case) -> int:
    """Tokens that one measured time stands for."""
    return case.rows if case.steps else case.context


def machine() -> str:
    """The processor and the versions that a figure belongs to."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    packages = ", ".join(f"{name} {version(name)}" for name in ("jaxinfer", "jax", "torch", "transformers"))
    return f"{names[0] if names else platform.processor()}; Python {platform.python_version()}; {packages}."


def main(
    model: Annotated[str, typer.Option(help="A GGUF file; the demo model by default.")] = "demo",
    threads: Annotated[int, typer.Option(help="CPUs that each side gets.")] = 2,
    rounds: Annotated[int, typer.Option(help="Turns of each side per row.", min=1, max=20)] = 5,
    only: Annotated[str, typer.Option(help="Rows whose name holds this text.")] = "",
    as_json: Annotated[Path | None, typer.Option("--json", help="Also write the rows to this file.")] = None,
) -> None:
    """Print a table of jaxinfer beside transformers, f32, on the same weights."""
    from jaxinfer.checkpoint.load import resolve
    from jaxinfer.errors import CheckpointError

    try:
        path = str(resolve(model))
    except CheckpointError as error:
        raise typer.BadParameter(str(error)) from error
    cases = [case for case in CASES if only in case.name]
    with (
        sides(path, threads) as both,
        tqdm(total=len(cases) * rounds, desc="turns", file=sys.stderr) as bar,
    ):
        rows = [measure(case, both, rounds, bar) for case in cases]
    print(f"{table(rows)} Float32, {threads} threads, medians of {rounds} turns a side. {machine()}")
    if as_json:
        as_json.write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
