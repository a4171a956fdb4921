"""Compiles every kernel and both steps for TPUs that are not there, and prints what they cost; docs/tpu.md explains.

python scripts/tpu_aot.py --libtpu .venv/libtpu
python scripts/tpu_aot.py --chip v6e --kernel paged_decode_attention --model llama3.1-8b --json
python scripts/tpu_aot.py kernel paged_decode_attention --shape "llama3-8b 16" --chip v6e --loops --libtpu .venv/libtpu
"""

import json
import os
import sys
from dataclasses import asdict
from typing import Annotated

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: it shall not look for a TPU

import typer
from aot import libtpu, table
from aot.chips import GENERATIONS, generation
from aot.compiling import mesh
from aot.figures import loop_lines, measure
from aot.jobs import named, require_some, select
from aot.kernels import DTYPES, cases
from published import PUBLISHED
from tqdm import tqdm

from pallas_kernels.dispatch import OPERATIONS

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Chips = Annotated[
    list[str] | None,
    typer.Option("--chip", metavar="NAME", help=f"Only this of {', '.join(GENERATIONS)}; may be repeated."),
]
DTypes = Annotated[
    list[str] | None,
    typer.Option("--dtype", metavar="NAME", help=f"Only this of {', '.join(DTYPES)}; may be repeated."),
]
Shape = Annotated[str, typer.Option(help="Only shapes whose name has this in it.")]
Library = Annotated[
    str | None, typer.Option("--libtpu", help="Folder of libtpu.so; else TPU_LIBRARY_PATH is the file.")
]


@app.callback(invoke_without_command=True)
def everything(
    context: typer.Context,
    *,
    chip: Chips = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", metavar="NAME", help=f"Only this of {', '.join(OPERATIONS)}; 'none' for none."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="NAME", help=f"Only steps of this of {', '.join(PUBLISHED)}; 'none' for none."),
    ] = None,
    dtype: DTypes = None,
    shape: Shape = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables of docs/tpu.md.")] = False,
    library: Library = None,
) -> None:
    """Compile every kernel at every shape and both steps of two models for TPUs, without one.

    Says how many bundles a kernel issues for a page beside the cycles in which the page arrives, and whether each
    program fits its chip. Exit code 1 where one does not compile or does not fit. About 20 minutes for everything.
    """
    if context.invoked_subcommand:
        if any((chip, kernel, model, dtype, shape, as_json, as_markdown, library)):
            raise ValueError(f"options of {context.invoked_subcommand} come behind it; got some before it")
        return
    libtpu.start(library)
    jobs = select(named(kernel, OPERATIONS), named(model, tuple(PUBLISHED)), tuple(dtype or DTYPES), shape, "tpu")
    pairs = [(job, generation(name).name) for name in chip or GENERATIONS for job in jobs]
    with tqdm(pairs, unit="program", disable=None) as bar:
        outcomes = []
        for job, name in bar:
            bar.set_description(f"{name} {job}"[:60])
            outcomes.append(table.run(job, name))
    if as_json:
        print(json.dumps([one.record() for one in outcomes]))
    else:
        print(table.markdown(outcomes) if as_markdown else table.text(outcomes))
    faults = table.fault_lines(outcomes)
    if faults and (as_json or as_markdown):
        print("\n".join(faults), file=sys.stderr)
    raise typer.Exit(1 if faults else 0)


@app.command()
def kernel(
    operation: Annotated[str, typer.Argument(help=f"One of {', '.join(OPERATIONS)}.")],
    *,
    shape: Shape = "",
    dtype: DTypes = None,
    chip: Chips = None,
    loops: Annotated[bool, typer.Option("--loops", help="Show every loop of the kernel.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON a case.")] = False,
    library: Library = None,
) -> None:
    """Compile one kernel and print its figures, a line a case; for tuning. A fault of the kernel is raised."""
    libtpu.start(library)
    found = list(cases(operation, tuple(dtype or DTYPES), shape))
    require_some(found, shape)
    for case in found:
        for name in chip or GENERATIONS:
            if refusal := case.refusal(mesh(generation(name).name)):
                print(f"{name} {case} is left to XLA: {refusal}", file=sys.stderr)
                continue
            figures, schedule = measure(case, name)
            print(json.dumps(asdict(figures)) if as_json else figures.line(), flush=True)
            if loops:
                print("\n".join(loop_lines(schedule, generation(name))), flush=True)


if __name__ == "__main__":
    try:
        app()
    except (libtpu.NoLibtpuError, ValueError) as error:
        sys.exit(f"tpu_aot: {error}")
