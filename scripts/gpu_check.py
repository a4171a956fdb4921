"""Checks all kernels of ours that run on a GPU and times the engine's steps, within a budget of seconds.

docs/gpu.md explains the table.

python scripts/gpu_check.py --json check.json                 on a machine with one GPU
python scripts/gpu_check.py --small                           the same on CPU: tiny, kernels interpreted
"""

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu.jobs import Clock, Job, Row

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("jax", "flax", "numpy", "jaxtyping", "psutil")
OPERATIONS = ("paged_decode_attention", "paged_prefill_attention", "kv_write", "quant_matmul")
KERNELS = tuple(f"kernels {operation}" for operation in OPERATIONS)
TIMINGS = ("speeds", "steps default", "steps pallas")
BUDGET, SMALL_BUDGET = 330.0, 3600.0
"""Seconds. A small run tells nothing of time, so that its own is for what hangs alone, however slow the machine is."""
KERNELS_SHARE = 0.4
"""Of the budget, what the kernels' check may take: it runs first, as a wrong kernel's time means nothing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check, or in a child one part of it; the exit code of `gpu.table.exit_code`."""
    options = _options(argv)
    sys.path[:0] = [*([options.packages] if options.packages else []), str(ROOT), str(ROOT / "scripts")]
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(
            f"missing: {', '.join(missing)}. Where there is no network, bring them in a folder: "
            f"pip install --target FOLDER --no-deps {' '.join(missing)} (with jaxtyping: wadler-lindig), "
            "then --packages FOLDER",
            file=sys.stderr,
        )
        return 3
    if options.part:
        return _carry_out(options)
    if options.json and (complaint := _unwritable(Path(options.json))):
        print(f"--json: {complaint}", file=sys.stderr)
        return 2
    if not options.small and (platform := _platform(options)) != "gpu":
        print(
            f"JAX sees {platform}; expected a GPU: there is none, or no `jax[cuda13]`. --small does all of it on CPU",
            file=sys.stderr,
        )
        return 4
    return _check(options)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, help=f"seconds for everything (default {BUDGET:.0f})")
    parser.add_argument("--json", metavar="FILE", help="write every row there")
    parser.add_argument("--small", action="store_true", help="tiny, on CPU, kernels interpreted")
    parser.add_argument("--packages", metavar="FOLDER", help="packages that this Python lacks")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("skip", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.budget is None:
        options.budget = SMALL_BUDGET if options.small else BUDGET
    return options


def _platform(options: argparse.Namespace) -> str:
    """What JAX runs on by default, asked in a process of its own, as one that has asked keeps the device."""
    path = os.pathsep.join(filter(None, (options.packages, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=False
    )
    return done.stdout.strip() or "nothing, and says why above"


def _carry_out(options: argparse.Namespace) -> int:
    """One part, in the process that is its own."""
    from gpu.jobs import carry_out

    carry_out(_jobs(options.part, options.small), options.skip, options.report)
    return 0


def _jobs(part: str, small: bool) -> "list[Job]":
    kind, _, which = part.partition(" ")
    if kind == "kernels":
        from gpu.kernels import kernel_jobs

        return kernel_jobs(which, small)
    if kind == "steps":
        from gpu.steps import step_jobs

        return step_jobs(which, small)
    from gpu.clock import speed_jobs

    return speed_jobs(small)


def _unwritable(file: Path) -> str:
    """Why nothing can be written there; "" where it can."""
    try:
        file.touch()
    except OSError as error:
        return str(error)
    return ""


def _clock() -> "Clock":
    """Seconds; from a SIGINT or SIGTERM on all time is over, so that every part ends and what was found is shown."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    return lambda: math.inf if stopped.is_set() else time.monotonic()


def _check(options: argparse.Namespace) -> int:
    from gpu.table import exit_code, table

    clock, begin = _clock(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = partial(_apart, options=options, folder=Path(folder), clock=clock)
        rows = _together(KERNELS, partial(run, deadline=begin + KERNELS_SHARE * options.budget))
        for part in TIMINGS:  # one after the other: each has the device to itself
            rows += run(part, deadline=begin + options.budget)
    spent = time.monotonic() - begin
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"\n{_versions()}; {spent:.0f} of {options.budget:.0f} s{', small' if options.small else ''}\n")
    print(table(rows))
    return exit_code(rows)


def _together(parts: Sequence[str], run: "Callable[[str], list[Row]]") -> "list[Row]":
    """Rows of parts that may run at once."""
    with ThreadPoolExecutor(len(parts)) as pool:
        return [row for rows in pool.map(run, parts) for row in rows]


def _apart(part: str, options: argparse.Namespace, folder: Path, clock: "Clock", deadline: float) -> "list[Row]":
    from gpu.jobs import run_apart

    report = folder / f"{part.replace(' ', '-')}.jsonl"
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--part", part, "--report", str(report)]
    command += ["--small"] if options.small else []
    command += ["--packages", options.packages] if options.packages else []
    rows = list(run_apart(part, command, report, deadline, _environment(part, options.small), clock=clock))
    print(f"{part}: {len(rows)} rows", file=sys.stderr, flush=True)
    return rows


def _environment(part: str, small: bool) -> dict[str, str]:
    """Kernels are checked side by side, so that none may take the whole device; a small run is for CPU."""
    return {
        **os.environ,
        **({"JAX_PLATFORMS": "cpu"} if small else {}),
        **({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if part in KERNELS else {}),
    }


def _versions() -> str:
    import jax

    return f"JAX {jax.__version__}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    sys.exit(main())
