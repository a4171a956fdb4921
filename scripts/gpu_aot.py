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
from aot.jobs import named, select
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
    jobs = select(named(kernel, OPERATIONS), named(model, tuple(PUBLISHED)), tuple(dtype or DTYPES), shape, "gpu")
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


if __name__ == "__main__":
    try:
        app()
    except (cuda.NoCudaError, ValueError) as error:
        sys.exit(f"gpu_aot: {error}")
