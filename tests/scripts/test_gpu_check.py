"""The check for a machine with a GPU: all of it on CPU in small, and what it says where something goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import psutil
import pytest

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "scripts" / "gpu_check.py"
OPERATIONS = ("paged_decode_attention", "paged_prefill_attention", "kv_write", "quant_matmul")

JOBS = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {scripts!r})
from gpu.jobs import Job, Outcome, carry_out
def well(): return Outcome("ok", figures={{"x": 1.0}})
def dies(): os._exit(9)
def hangs(): time.sleep(3600)
def refuses(): raise NotImplementedError("pages are int8")
def breaks(): raise ValueError("no such layout")
carry_out([Job(name, globals()[name]) for name in {names!r}], sys.argv[1:], Path({report!r}))
"""


@pytest.fixture(scope="session")
def jobs(script: Callable[[str], ModuleType]) -> Any:
    script("gpu_check")
    from gpu import jobs

    return jobs


def run_jobs(jobs: Any, folder: Path, names: list[str], ends: str = "") -> dict[str, tuple[str, str]]:
    """Status and reason of each job of a part whose process does `names` one after the other.

    ends: the job at whose beginning the time is over.
    """
    report = folder / "report.jsonl"
    source = JOBS.format(scripts=str(CHECK.parent), names=names, report=str(report))

    def clock() -> float:
        begun = report.read_text().splitlines() if report.exists() else []
        return float(json.dumps({"begun": ends}) in begun)

    deadline = jobs.GRACE + 1
    rows = jobs.run_apart(
        "part", [sys.executable, "-c", source], report, deadline, {}, clock=lambda: deadline * clock()
    )
    return {row.name: (row.outcome.status, row.outcome.why) for row in rows}


def row(jobs: Any, part: str, name: str, status: str, **figures: float) -> Any:
    return jobs.Row(part, name, jobs.Outcome(status, "why", figures))


def test_a_small_run_on_cpu_does_every_part(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    command = [sys.executable, str(CHECK), "--small", "--json", str(found)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(found.read_text())
    assert {each["outcome"]["status"] for each in rows} == {"ok"}
    parts = [*(f"kernels {operation}" for operation in OPERATIONS), "speeds", "steps default", "steps pallas"]
    assert list(dict.fromkeys(each["part"] for each in rows)) == parts
    for operation in OPERATIONS:
        of_operation = [each for each in rows if each["part"] == f"kernels {operation}"]
        assert [each["name"].split(" | ")[0] for each in of_operation] == ["xla", "gpu"]
        assert all(each["outcome"]["figures"].keys() == {"error"} for each in of_operation)  # beside others: no time
    assert len(ended.stdout.splitlines()) < 60


def test_packages_that_are_not_there_are_named() -> None:
    ended = subprocess.run([sys.executable, "-I", "-S", str(CHECK)], capture_output=True, text=True, check=False)
    assert ended.returncode == 3
    assert "missing: jax, flax, numpy, jaxtyping, psutil" in ended.stderr
    assert "--packages" in ended.stderr


def test_a_job_that_dies_costs_its_own_row(jobs: Any, tmp_path: Path) -> None:
    found = run_jobs(jobs, tmp_path, ["well", "dies", "refuses", "breaks"])
    assert found["well"][0] == "ok"
    assert found["dies"] == ("failed", "the process ended with 9: ")
    assert found["refuses"] == ("refused", "pages are int8")
    assert found["breaks"] == ("failed", "ValueError: no such layout")


def test_a_job_that_hangs_is_stopped_and_what_follows_did_not_run(jobs: Any, tmp_path: Path) -> None:
    found = run_jobs(jobs, tmp_path, ["well", "hangs", "refuses"], ends="hangs")
    assert found["well"][0] == "ok"
    assert found["hangs"] == ("failed", "stopped: the time of part was over")
    assert found["refuses"] == ("not run", "no time was left")


def test_a_part_that_never_starts_is_one_row(jobs: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no module')"]
    (only,) = jobs.run_apart("part", command, tmp_path / "report.jsonl", time.monotonic() + 3600, {})
    assert (only.outcome.status, only.outcome.why) == ("failed", "the process ended with 1: no module")
    (late,) = jobs.run_apart("part", command, tmp_path / "report.jsonl", time.monotonic(), {})
    assert late.outcome.status == "not run"


@pytest.mark.parametrize(
    ("statuses", "code"),
    [(["ok", "refused"], 0), (["ok", "wrong"], 1), (["failed", "not run"], 1), (["ok", "not run"], 2)],
)
def test_the_exit_code_tells_wrong_from_not_run(jobs: Any, statuses: list[str], code: int) -> None:
    from gpu.table import exit_code

    assert exit_code([row(jobs, "speeds", "copy", status) for status in statuses]) == code


def test_the_table_sets_each_step_against_its_floor(jobs: Any) -> None:
    from gpu.table import table

    text = table(
        [
            row(jobs, "kernels kv_write", "gpu | a", "wrong", error=0.5),
            row(jobs, "kernels kv_write", "gpu | b", "ok", error=0.0),
            row(jobs, "speeds", "copy", "ok", bytes_per_s=4e12),
            row(jobs, "speeds", "gemm", "ok", flops_per_s=8e14),
            row(jobs, "steps default", "decode 16", "ok", ms=8.0, bytes=16e9),
            row(jobs, "steps default", "prefill 512", "ok", ms=20.0, flops=8e12),
            row(jobs, "steps pallas", "decode 16", "not run"),
        ]
    )
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert lines["kv_write, gpu"][2:] == ["1", "1", "-", "-", "-", "0.5"]
    assert lines["decode 16"][2:] == ["pallas", "not", "run"]
    assert "decode 16       default         8.00      2000      4.00       50%" in text
    assert "prefill 512     default        20.00     25600     10.00       50%" in text
    assert "wrong: kernels kv_write, gpu | a: why" in text
    assert "not run: 1 of steps pallas" in text


def test_a_wrong_form_is_wrong(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import kernels

    forms = {"reference": lambda x: x, "bent": lambda x: x * 1.5, "holed": lambda x: x.at[0].set(jnp.nan)}
    monkeypatch.setattr(kernels, "choose", lambda operation, form: forms[form])

    def make() -> Any:
        return kernels.Call((jnp.arange(4.0),), {})

    assert kernels.check("quant_matmul", "reference", make, small=True).status == "ok"
    assert kernels.check("quant_matmul", "bent", make, small=True).status == "wrong"
    assert kernels.check("quant_matmul", "holed", make, small=True).figures["error"] == float("inf")


def test_all_forms_of_a_shape_meet_one_reference(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import kernels

    made = []

    def reference(x: Any) -> Any:
        made.append("reference")
        return x + 1

    monkeypatch.setattr(
        kernels, "choose", lambda operation, form: reference if form == "reference" else lambda x: x + 1
    )

    def make() -> Any:
        made.append("call")
        return kernels.Call((jnp.arange(4.0),), {}, donated=True)

    for form in ("xla", "gpu"):
        assert kernels.check("kv_write", form, make, small=False).status == "ok"
    assert made == ["call", "reference"]


def test_a_step_that_fails_leaves_the_next_one_a_state(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import steps

    def broken(params: Any, state: Any, packed: Any) -> Any:
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        raise RuntimeError("out of memory")

    def sound(params: Any, state: Any, packed: Any) -> Any:
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        return state, jnp.zeros((1, 1), jnp.int32)

    monkeypatch.setattr(steps.Bench, "compiled", lambda self: {("decode", 2): broken, ("prefill", 16): sound})
    bench = steps.Bench(steps.SMALL, {})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            bench.time("decode", 2)
        assert bench.time("prefill", 16) >= 0


def test_without_a_gpu_it_says_so_at_once() -> None:
    done = subprocess.run(
        [sys.executable, CHECK], capture_output=True, text=True, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == (
        "JAX sees cpu; expected a GPU: there is none, or no `jax[cuda13]`. --small does all of it on CPU\n"
    )


def test_a_file_that_cannot_be_written_is_found_before_anything_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, CHECK, "--small", "--json", tmp_path / "none" / "x.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--json: [Errno 2] No such file or directory")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_process_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    check = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import signal, runpy, sys; signal.signal({number}, signal.default_int_handler); "
            f"sys.argv = ['x', '--small']; runpy.run_path({str(CHECK)!r}, run_name='__main__')",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    while len(list(tmp_path.glob("*/*.log"))) < len(OPERATIONS):
        assert check.poll() is None
        time.sleep(0.05)
    children = psutil.Process(check.pid).children(recursive=True)
    check.send_signal(number)
    said, _ = check.communicate()
    assert "not run" in said
    assert check.returncode in (1, 2)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not list(tmp_path.iterdir())
