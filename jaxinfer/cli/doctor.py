"""`jaxinfer doctor`: is this model what it says it is, and do we run it as it should be run?"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.flags import DEMO, QuantizeFlag, RefArgument
from jaxinfer.cli.json_text import json_text
from jaxinfer.config import DTypeName, EngineConfig
from jaxinfer.progress import progress_bars

if TYPE_CHECKING:
    from jaxinfer.doctor.diagnose import Comparison, Diagnosis, Run

UNHEALTHY = 1


def command(
    ref: RefArgument = DEMO,
    *,
    reference: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A Hugging Face directory of the same model, to be run by transformers."),
    ] = None,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What is run.")] = "The capital of France is",
    dtype: Annotated[
        DTypeName | None,
        typer.Option(help="Of the weights; unset, float32 on CPU and beside a reference, bfloat16 elsewhere."),
    ] = None,
    quantize: QuantizeFlag = None,
    tolerance: Annotated[
        float, typer.Option(help="How far a part may be from the reference's, as a share of its largest magnitude.")
    ] = 1e-3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with figures of every tensor.")] = False,
) -> None:
    """Examine a model: its configuration, every tensor, a run, and how far it is from transformers.

    Prints the configuration as it was understood and every field that was ignored; tensors that are not finite, far
    from the scale of their peers, or dead in a row; a greedy continuation, the kernels that made it, and what it takes.
    With --reference, transformers (pip install 'jaxinfer[bench]') runs the same prompt in float32, and the first part
    that diverges is named, with the first of its tensors that we hold otherwise; the rounding of --quantize counts,
    unless --tolerance is raised to some hundredths. Exit code 1: something is wrong; 2: the model cannot be loaded.

    \b
    jaxinfer doctor demo
    jaxinfer doctor model.gguf --reference ./the-original --prompt "Once upon a time"
    """
    from jaxinfer.doctor.diagnose import diagnose
    from jaxinfer.engine.compilation import enable_persistent_cache
    from jaxinfer.engine.runner import engine_dtype

    enable_persistent_cache()
    named = dtype or ("float32" if reference else engine_dtype(EngineConfig()))
    with progress_bars(sys.stderr.isatty()) as report:
        found = diagnose(
            ref,
            prompt=prompt,
            dtype=named,
            quantize=quantize,
            reference=reference,
            tolerance=tolerance,
            report=report,
        )
    print(json_text(found.as_json()) if as_json else text(found))
    if found.faults:
        raise typer.Exit(UNHEALTHY)


def text(found: "Diagnosis") -> str:
    """The diagnosis for people."""
    sections = [
        found.name,
        *_section("configuration", _rows(dict(_fields(asdict(found.config))))),
        *_section("ignored fields", wrap(", ".join(found.ignored), 100) or ["none"]),
        *_section("tensors", _tensor_lines(found)),
        *_section("run", _run_lines(found.run)),
        *(_section("reference", _reference_lines(found.comparison)) if found.comparison else ()),
        "",
        f"{len(found.faults)} fault(s)" if found.faults else "healthy",
        *(f"  {fault}" for fault in found.faults),
    ]
    return "\n".join(sections)


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)]


def _fields(values: dict[str, Any], inside: str = "") -> Iterator[tuple[str, str]]:
    """Every field by its name; those of a part behind the part's own."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{inside}{name}.")
        else:
            yield f"{inside}{name}", repr(value)


def _rows(values: dict[str, str]) -> list[str]:
    width = max(map(len, values))
    return [f"{name:{width}}  {value}" for name, value in values.items()]


def _tensor_lines(found: "Diagnosis") -> list[str]:
    matrices = [stats for stats in found.tensors if stats.kind == "matrix"]
    small, large = (pick(matrices, key=lambda stats: stats.rms) for pick in (min, max))
    return [
        f"{len(found.tensors)} tensors, {sum(stats.size for stats in found.tensors):,} numbers",
        f"rms of matrices from {small.rms:.3g} ({small.name}) to {large.rms:.3g} ({large.name})",
        *(f"{name}: {why}" for name, why in found.suspicious),
    ]


def _run_lines(run: "Run") -> list[str]:
    return _rows(
        {
            "prompt": repr(run.prompt),
            "continuation": repr(run.text),
            "activations": "finite" if run.not_finite is None else f"{run.not_finite} is not finite",
            "weights": f"{run.weight_bytes / 2**20:.1f} MiB, {run.weights}",
            "cache": f"{run.cache_bytes / 2**10:.1f} KiB a token",
            "decode step": f"{run.step_ms:.2f} ms at least on this machine, bound by {run.bound_by}",
        }
        | dict(line.split(": ", 1) for line in run.kernels.splitlines())
    )


def _reference_lines(comparison: "Comparison") -> list[str]:
    width = max(len(row.part) for row in comparison.parts)
    lines = [
        f"{row.part:{width}}  differs by {row.difference:.2e}, {row.share:.1e} of its largest"
        for row in comparison.parts
    ]
    if comparison.diverged is None:
        return [*lines, "no part diverges"]
    tensors = ", ".join(comparison.tensors) or "none: the arithmetic or the configuration differs"
    return [*lines, f"first to diverge: {comparison.diverged}", f"its tensors that differ: {tensors}"]
