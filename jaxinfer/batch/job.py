"""Runs a batch job: input lines through the engine, records out in input order, lazily.

Knows: how lines, engine and output file fit together, and what makes two jobs the same. At most WINDOW_PER_SLOT lines
per slot are held at once, so a file of a million lines needs no more memory than one of a thousand.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from tqdm import tqdm

from jaxinfer.batch.journal import Journal, Pipe, Sink, begun_by_path
from jaxinfer.batch.lines import Ask, parse_line, read_lines
from jaxinfer.batch.records import Record, answer, breakdown, refusal
from jaxinfer.errors import EngineFault, RequestError
from jaxinfer.llm import LLM
from jaxinfer.output import Output
from jaxinfer.request import Request, SamplingParams

WINDOW_PER_SLOT = 16
REFRESH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Summary:
    """Records in the output, over all runs of the job: how many, and how many of them are errors."""

    lines: int
    failed: int


def run_file(
    load: Callable[[], LLM],
    ref: str,
    source: Path,
    target: Path,
    defaults: SamplingParams,
    *,
    overwrite: bool,
    progress: bool,
) -> Summary:
    """Answer every line of `source` in `target`, going on where an earlier run of the same job stopped.

    The model, named `ref`, is loaded only where lines are left. Raises RequestError where `source` cannot be read, or
    `target` belongs to another job or another process.
    """
    with _open(source) as file:
        _check_apart(source, target)
        sink = Journal.open(target, fingerprint(file, ref, defaults), overwrite=overwrite)
        with closing(sink):
            total = count_lines(file)
            file.seek(0)
            if sink.done == total:
                return Summary(sink.done, sink.failed)
            return run(load(), file, sink, defaults, names={ref, Path(ref).stem}, total=total, progress=progress)


def run_pipe(
    load: Callable[[], LLM],
    ref: str,
    source: Path,
    target: Path,
    defaults: SamplingParams,
    *,
    overwrite: bool,
    progress: bool,
) -> Summary:
    """As `run_file`, where `-` is standard input or output; such a job cannot go on after a crash."""
    if target.exists() and not overwrite:
        raise RequestError(f"{target} exists, and a job that reads a pipe cannot go on; --overwrite it")
    with ExitStack() as files:
        file = _standard(sys.stdin, "input") if str(source) == "-" else files.enter_context(_open(source))
        if str(target) == "-":
            out, llm = _standard(sys.stdout, "output"), load()
        else:
            _check_apart(Path("/dev/stdin") if str(source) == "-" else source, target)
            llm = load()
            begun_by_path(target).unlink(missing_ok=True)  # no later job may take these records for its own
            out = files.enter_context(target.open("wb"))
        return run(llm, file, Pipe(out), defaults, names={ref, Path(ref).stem}, progress=progress)


def _standard(stream: TextIO | None, name: str) -> BinaryIO:
    if stream is None:  # as after `<&-` in a shell
        raise RequestError(f"standard {name} is closed; expected it open, or a file instead of -")
    return stream.buffer  # pyright: ignore[reportReturnType]


def _check_apart(source: Path, target: Path) -> None:
    """Raises RequestError where writing `target`, or what remembers its job, would destroy the input."""
    for path in (target, begun_by_path(target)):
        if path.exists() and path.samefile(source):
            raise RequestError(f"{path} is both input and written by this job; choose another output")


def _open(source: Path) -> BinaryIO:
    try:
        return source.open("rb")
    except OSError as error:
        raise RequestError(f"{source} cannot be read: {error.strerror}") from None


def fingerprint(file: BinaryIO, ref: str, defaults: SamplingParams) -> dict[str, Any]:
    """What makes a job the same job: the input's bytes, the model, the parameters of lines that give none."""
    digest = hashlib.sha256()
    while piece := file.read(2**20):
        digest.update(piece)
    file.seek(0)
    given = {**asdict(defaults), "logit_bias": {str(token): bias for token, bias in defaults.logit_bias.items()}}
    return {
        "input": digest.hexdigest(),
        "model": ref,
        "parameters": {k: list(v) if isinstance(v, tuple) else v for k, v in given.items()},
    }


def count_lines(file: BinaryIO) -> int:
    """Lines to answer, from where the file stands."""
    return sum(1 for _ in read_lines(file))


def run(
    llm: LLM,
    file: BinaryIO,
    sink: Sink,
    defaults: SamplingParams,
    *,
    names: set[str],
    total: int | None = None,
    progress: bool = False,
) -> Summary:
    """Answer the lines of `file` that `sink` does not hold yet. `names`: what a line may call the model.

    `total` lines are expected, where known, for the bar's ETA.
    """
    assembly = llm.assembly
    names = names | {assembly.name}
    window = WINDOW_PER_SLOT * assembly.engine.slots
    done, failed = sink.done, sink.failed
    with Meter(llm, total, done, show=progress) as meter:
        jobs = _jobs(llm, file, sink.done, defaults, names)
        with closing(llm.driver.run_in_order(jobs, window=window, on_step=meter.refresh)) as results:
            for ask, outputs in results:
                record = _record(ask, outputs, assembly.name)
                sink.append(record)
                done, failed = done + 1, failed + (record["error"] is not None)
                meter.advance()
    return Summary(done, failed)


def _record(ask: Ask, outputs: Sequence[Output] | RequestError | EngineFault, model: str) -> Record:
    if isinstance(outputs, EngineFault):
        return breakdown(ask, str(outputs))
    if isinstance(outputs, RequestError):
        return refusal(ask, str(outputs))
    return refusal(ask, ask.error) if ask.error else answer(ask, outputs, model)


def _jobs(
    llm: LLM, file: BinaryIO, skip: int, defaults: SamplingParams, names: set[str]
) -> Iterator[tuple[Ask, Sequence[Request]]]:
    for line in islice(read_lines(file), skip, None):
        ask = parse_line(line, defaults, names.__contains__)
        requests: list[Request] = []
        try:
            requests = [llm.assembly.request(prompt, ask.params) for prompt in ask.prompts]
        except RequestError as error:
            ask = replace(ask, prompts=(), error=str(error))
        yield replace(ask, prompts=()), requests


class Meter:
    """The bar: lines done, lines to go and their ETA, and how fast tokens are made."""

    def __init__(self, llm: LLM, total: int | None, done: int, *, show: bool) -> None:
        self._driver = llm.driver
        self._before = llm.driver.generated
        self._began = self._drawn = time.monotonic()
        self._bar = tqdm(total=total, initial=done, desc="batch", unit="line", dynamic_ncols=True, disable=not show)

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._draw(time.monotonic())
        self._bar.close()

    def advance(self) -> None:
        """One more line is done."""
        self._bar.update()

    def refresh(self) -> None:
        """Draw the token rate, a few times a second: between two lines may lie minutes."""
        now = time.monotonic()
        if now - self._drawn >= REFRESH_SECONDS:
            self._draw(now)

    def _draw(self, now: float) -> None:
        self._drawn = now
        rate = (self._driver.generated - self._before) / max(now - self._began, 1e-9)
        self._bar.set_postfix_str(f"{rate:.1f} tok/s")
