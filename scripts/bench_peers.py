"""Measure jaxinfer beside Hugging Face transformers: same weights, same machine, one run, as ratios.

Each side lives in a process of its own with the same CPUs; they take turns, so that a slow minute of the machine hits
both. Ours goes through `EngineLoop` with everything that serving does to a step (planning, packing, sampling, the copy
of the tokens to the host), prefix cache off. Theirs is the model's forward pass with its default cache and an argmax.

    pip install -e '.[bench]'
    python scripts/bench_peers.py > table.md
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Protocol

import numpy as np
import typer
from tqdm import tqdm

SETTLE = 0.5  # seconds of rest after a turn: a step that was dispatched ahead, or spinning threads, end in it
Prompts = list[list[int]]


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


class Peer(Protocol):
    """One side. Times are seconds; `prefill` and `fill` give the first token of each row too."""

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        """Time from the prompt to its first token."""
        ...

    def fill(self, prompts: Prompts) -> list[int]:
        """Make sequences ready to decode, in place of those before."""
        ...

    def decode(self, steps: int) -> list[float]:
        """Time of each of `steps` steps over all sequences that `fill` made ready."""
        ...


class Ours:
    """jaxinfer through its engine loop, `slots` sequences at most."""

    def __init__(self, ref: str, slots: int = 32) -> None:
        from jaxinfer.assembly import assemble
        from jaxinfer.config import CacheConfig, EngineConfig

        cache = CacheConfig(pages=slots * 24)  # each row has room for 1,024 tokens and the most turns
        self._assembly = assemble(ref, EngineConfig(slots=slots, dtype="float32", prefix_cache=False, cache=cache))
        self._live: list[str] = []

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        """Time from `add` to the delivered token."""
        start = time.perf_counter()
        (first,) = self._start([prompt], 1).values()
        return time.perf_counter() - start, first

    def fill(self, prompts: Prompts) -> list[int]:
        """Prefill every prompt for real; the sequences then decode until the next call stops them."""
        from jaxinfer.request import FinishReason

        for request in self._live:
            self._assembly.loop.stop(request, FinishReason.CANCELLED)
        while self._assembly.loop.busy:
            self._assembly.loop.step()
        firsts = self._start(prompts, 1_000)
        self._live = list(firsts)
        return list(firsts.values())

    def decode(self, steps: int) -> list[float]:
        """Times of `step`; the first, whose work was dispatched ahead, is left out."""
        return _timed(self._assembly.loop.step, steps)

    def _start(self, prompts: Prompts, max_tokens: int) -> dict[str, int]:
        from jaxinfer.request import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        requests = [self._assembly.request(prompt, params) for prompt in prompts]
        for request in requests:
            self._assembly.loop.add(request)
        firsts: dict[str, int] = {}
        while len(firsts) < len(requests):
            for event in self._assembly.loop.step():
                if event.tokens:
                    firsts.setdefault(event.request_id, event.tokens[0].token)
        return {request.id: firsts[request.id] for request in requests}


class Theirs:
    """transformers: the same GGUF file, decoded to float32 by transformers itself."""

    def __init__(self, ref: str, threads: int) -> None:
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

        torch.set_num_threads(threads)
        file = Path(ref)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        self._torch = torch
        self._model = model.eval()
        self._cache: Any = None
        self._last: Any = None

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        """Time of one forward pass over the prompt, logits of its last token only."""
        start = time.perf_counter()
        self._forward(self._torch.tensor([prompt]), None)
        return time.perf_counter() - start, int(self._last[0, 0])

    def fill(self, prompts: Prompts) -> list[int]:
        """Run the first prompt and repeat its cache, in memory of its own, for every other row."""
        self._forward(self._torch.tensor(prompts[:1]), None)
        first = int(self._last[0, 0])
        self._cache.batch_repeat_interleave(len(prompts))
        self._last = self._last.repeat(len(prompts), 1)
        return [first]

    def decode(self, steps: int) -> list[float]:
        """Times of forward passes that each extend the cache by one token."""
        return _timed(lambda: self._forward(self._last, self._cache), steps)

    def _forward(self, ids: Any, cache: Any) -> None:
        with self._torch.inference_mode():
            out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._cache, self._last = out.past_key_values, out.logits[:, -1:].argmax(-1)


def _timed(step: Callable[[], Any], steps: int) -> list[float]:
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times[1:]


# ---- each side in a process of its own -------------------------------------------------------------------------------

_peer: Peer


def _open(ours: bool, ref: str, threads: int) -> None:
    """Start a side in this process, on `threads` CPUs where the system can pin a process."""
    global _peer
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    _peer = Ours(ref) if ours else Theirs(ref, threads)


def _call(method: str, *arguments: Any) -> Any:
    result = getattr(_peer, method)(*arguments)
    time.sleep(SETTLE)
    return result


class Side:
    """Calls a peer in its process and waits."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def call(self, method: str, *arguments: Any) -> Any:
        """What the peer's method returned."""
        return self._pool.submit(_call, method, *arguments).result()


@contextmanager
def sides(ref: str, threads: int) -> Iterator[tuple[Side, Side]]:
    """Both peers, loaded and warm."""
    spawn = get_context("spawn")
    with (
        ProcessPoolExecutor(1, spawn, _open, (True, ref, threads)) as ours,
        ProcessPoolExecutor(1, spawn, _open, (False, ref, threads)) as theirs,
    ):
        yield Side(ours), Side(theirs)


# ---- measuring and printing ------------------------------------------------------------------------------------------


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
