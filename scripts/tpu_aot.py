"""Compiles every kernel and both steps for TPUs that are not there, and prints what they cost. docs/tpu.md explains.

python scripts/tpu_aot.py kernel paged_decode_attention --shape "llama3-8b 16" --chip v6e --loops
"""

import json
import os
import sys
from dataclasses import asdict
from typing import Annotated

os.environ["JAX_PLATFORMS"] = "cpu"

import typer
from aot import libtpu
from aot.chips import GENERATIONS, generation
from aot.figures import loop_lines, measure
from aot.kernels import DTYPES, cases

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Chips = Annotated[list[str] | None, typer.Option("--chip", metavar="NAME", help="Only this chip; may be repeated.")]
Library = Annotated[str | None, typer.Option("--libtpu", help="Folder of libtpu.so; else TPU_LIBRARY_PATH names it.")]


@app.callback()
def callback() -> None:
    """Compile for TPUs without one."""


@app.command()
def kernel(
    operation: str,
    *,
    shape: Annotated[str, typer.Option(help="Only shapes whose name has this in it.")] = "",
    dtype: Annotated[list[str] | None, typer.Option(help="Only this; may be repeated.")] = None,
    chip: Chips = None,
    loops: Annotated[bool, typer.Option("--loops", help="Show every loop of the kernel.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON a case.")] = False,
    library: Library = None,
) -> None:
    """Compile one kernel and print its figures, a line a case; for tuning."""
    libtpu.start(library)
    for case in cases(operation, tuple(dtype or DTYPES), shape):
        for name in chip or GENERATIONS:
            found, schedule = measure(case, name)
            print(json.dumps(asdict(found)) if as_json else found.line(), flush=True)
            if loops:
                print("\n".join(loop_lines(schedule, generation(name))), flush=True)


if __name__ == "__main__":
    try:
        app()
    except (libtpu.NoLibtpuError, ValueError) as error:
        sys.exit(f"tpu_aot: {error}")
