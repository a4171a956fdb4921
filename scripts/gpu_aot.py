"""Compiles every GPU kernel, and both steps with them, for an H200 that is not there, and prints what they take.

PYTHONPATH=.venv/cuda python scripts/gpu_aot.py
PYTHONPATH=.venv/cuda python scripts/gpu_aot.py --kernel paged_decode_attention --shape llama3 --dtype bfloat16

`make cuda` installs the compiler in .venv/cuda; docs/gpu.md explains the figures.
"""

import json
import os
import sys
from typing import Annotated

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: it shall not look for a GPU

import typer
from aot import cuda, cuda_table
from aot.kernels import cases
from aot.steps import KINDS, Serving, StepJob, config_of
from aot.table import aligned, piped
from published import PUBLISHED
from tqdm import tqdm

from pallas_kernels.dispatch import OPERATIONS

DTYPES = ("bfloat16", "int8")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    *,
    kernel: Annotated[list[str] | None, typer.Option(help="Only this operation; 'none' for none.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only steps of this; 'none' for none.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only pages of this; may be repeated.")] = None,
    shape: Annotated[str, typer.Option(help="Only shapes whose name has this in it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables of docs/gpu.md.")] = False,
) -> None:
    """Compile every GPU kernel at every shape, and the steps of two models of two layers, for an H200, without one.

    Exit code 1 where one does not compile. Minutes for everything.
    """
    cuda.start()
    jobs = _jobs(_named(kernel, OPERATIONS), _named(model, tuple(PUBLISHED)), tuple(dtype or DTYPES), shape)
    with tqdm(jobs, unit="program", disable=None) as bar:
        outcomes = [cuda_table.run(job) for job in bar]
    if as_json:
        print(json.dumps([one.record() for one in outcomes]))
    else:
        show = piped if as_markdown else aligned
        print("\n\n".join(map(show, cuda_table.tables(outcomes))))
    notes = [f"{one.job} is left to XLA: {one.refusal}" for one in outcomes if one.refusal]
    faults = [f"{one.job}: {one.fault}" for one in outcomes if one.fault]
    print("\n".join([*notes, *faults]), file=sys.stderr)
    raise typer.Exit(1 if faults else 0)


def _named(given: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """What was asked for, all of it by default."""
    return () if given == ["none"] else tuple(given or known)


def _jobs(
    kernels: tuple[str, ...], models: tuple[str, ...], dtypes: tuple[str, ...], shape: str
) -> list[cuda_table.Job]:
    """Raises ValueError for what does not exist, and for nothing at all."""
    jobs: list[cuda_table.Job] = [case for name in kernels for case in cases(name, dtypes, shape, "gpu")]
    for model in models:
        config_of(model)
        jobs += [StepJob(model, kind, Serving()) for kind in KINDS]
    if not jobs:
        raise ValueError(f"nothing to compile: no kernel with a shape that has {shape!r} in its name, and no model")
    return jobs


if __name__ == "__main__":
    try:
        app()
    except (cuda.NoCudaError, ValueError) as error:
        sys.exit(f"gpu_aot: {error}")
