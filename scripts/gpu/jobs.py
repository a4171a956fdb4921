"""Jobs that report to a file, in a process of their own: one that dies or hangs costs its own row and no other.

Knows: names, outcomes, the file between the two processes. Knows nothing of what a job does.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["ok", "wrong", "refused", "failed", "not run"]
GRACE = 5.0
"""Seconds below which no process is started any more."""
POLL = 0.05
"""Seconds between two looks at a process."""
Clock = Callable[[], float]


@dataclass(frozen=True)
class Outcome:
    """What came of a job: `figures` by name, and why it is not "ok"."""

    status: Status
    why: str = ""
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Something to do, by a name that no other job of its part has."""

    name: str
    run: Callable[[], Outcome]


@dataclass(frozen=True)
class Row:
    """A job's outcome, as the table shows it."""

    part: str
    name: str
    outcome: Outcome


def first_line(error: BaseException) -> str:
    """The kind of an error, and what it says, in one line of 160 characters at most."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:160]


def carry_out(jobs: Sequence[Job], skip: Iterable[str], report: Path) -> None:
    """Run `jobs` but those of `skip`, one line of JSON before and one after each, so that a death leaves its name."""
    skipped = set(skip)
    with report.open("a") as file:

        def write(**line: object) -> None:
            print(json.dumps(line), file=file, flush=True)

        write(names=[job.name for job in jobs])
        for job in jobs:
            if job.name not in skipped:
                write(begun=job.name)
                write(done=job.name, **asdict(_attempt(job)))


def _attempt(job: Job) -> Outcome:
    try:
        return job.run()
    except NotImplementedError as refusal:
        return Outcome("refused", first_line(refusal).removeprefix("NotImplementedError: "))
    except Exception as error:  # a kernel that does not compile is a row of the table
        return Outcome("failed", first_line(error))


def run_apart(
    part: str,
    command: Sequence[str],
    report: Path,
    deadline: float,
    environment: Mapping[str, str],
    *,
    clock: Clock = time.monotonic,
) -> Iterator[Row]:
    """The rows of a part: `command` is run until all its jobs are done or `clock` is at `deadline`.

    It takes the names to skip as arguments. A process that dies is started again behind the job that it died of.
    """
    lines: list[dict[str, object]] = []
    while deadline - clock() > GRACE:
        report.unlink(missing_ok=True)
        ended = _run(part, [*command, *_settled(lines)], report, lambda: clock() >= deadline, environment)
        new = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        lines += new
        begun = {str(line["begun"]) for line in new if "begun" in line} - _settled(lines)
        if ended == "" and not begun:
            break
        lines += [{"done": name, "status": "failed", "why": ended, "figures": {}} for name in begun]
        if not begun:
            lines.append({"died": ended})
            break
    return _rows(part, lines)


def _run(
    part: str, command: Sequence[str], report: Path, over: Callable[[], bool], environment: Mapping[str, str]
) -> str:
    """Why the process ended, "" where it was done."""
    with report.with_suffix(".log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=dict(environment))
        try:
            while process.poll() is None:
                if over():
                    return f"stopped: the time of {part} was over"
                time.sleep(POLL)
        finally:  # also where the check itself is interrupted; of one that has ended it asks nothing
            process.kill()
            process.wait()
        log.seek(0)
        said = log.read().strip().splitlines()
    if code := process.returncode:
        print(f"--- {part} ended with {code}", *said[-15:], sep="\n", file=sys.stderr)
    return f"the process ended with {code}: {said[-1] if said else ''}"[:160] if code else ""


def _settled(lines: Sequence[dict[str, object]]) -> set[str]:
    return {str(line["done"]) for line in lines if "done" in line}


def _rows(part: str, lines: Sequence[dict[str, object]]) -> Iterator[Row]:
    names = dict.fromkeys(name for line in lines if isinstance(line.get("names"), list) for name in line["names"])  # type: ignore[union-attr]
    for line in lines:
        if "done" in line:
            name = str(line["done"])
            names.pop(name, None)
            yield Row(part, name, Outcome(line["status"], str(line["why"]), line["figures"]))  # type: ignore[arg-type]
    died = [str(line["died"]) for line in lines if "died" in line]
    for name in names:
        yield Row(part, name, Outcome("not run", "no time was left"))
    if not any("names" in line for line in lines):
        yield Row(part, "all", Outcome("failed" if died else "not run", died[0] if died else "no time was left"))
