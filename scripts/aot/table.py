"""Everything that scripts/tpu_aot.py compiles, and what it prints of it: lines, JSON, or the tables of docs/tpu.md."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aot.chips import GENERATIONS
from aot.compiling import mesh
from aot.figures import Figures, measure
from aot.jobs import Job
from aot.kernels import Case
from aot.steps import Step, compile_step, config_of

GIB = 2.0**30
KERNEL_COLUMNS = (
    "kernel",
    "shape",
    "dtype",
    "chip",
    "bundles",
    "bundles / unit",
    "bytes / unit",
    "DMA cycles",
    "ratio",
)
STEP_COLUMNS = ("step", "chip", "devices", "GiB of each", "GiB it has", "kernels", "compiled in")


@dataclass(frozen=True)
class Outcome:
    """What came of one job on one chip.

    fault: what is wrong with it, None for nothing. refusal: why the kernel leaves this case to XLA, None where it runs.
    """

    job: Job
    chip: str
    found: Figures | Step | None = None
    fault: str | None = None
    refusal: str | None = None

    def record(self) -> dict[str, Any]:
        """As plain data."""
        of: dict[str, Any] = {"job": str(self.job), "chip": self.chip, "fault": self.fault, "refusal": self.refusal}
        if isinstance(self.found, Figures):
            of |= {name: getattr(self.found, name) for name in self.found.__dataclass_fields__}
            of["bound"] = self.found.bound
        elif self.found:
            program = self.found.program
            of |= {
                "step": self.found.kind,
                "devices": self.found.tensor,
                "device_bytes": program.bytes,
                "device_memory": program.chip.device_memory,
                "kernels": self.found.kernels,
                "seconds": program.seconds,
            }
        return of


def run(job: Job, chip: str) -> Outcome:
    """Compile a job. What is raised while it is lowered or compiled is the outcome, whatever its type."""
    if isinstance(job, Case) and (refusal := job.refusal(mesh(chip))):
        return Outcome(job, chip, refusal=refusal)
    try:
        if isinstance(job, Case):
            return Outcome(job, chip, measure(job, chip)[0])
        step = compile_step(config_of(job.model), job.kind, chip, job.serving)
    except Exception as error:
        return Outcome(job, chip, fault=f"{type(error).__name__}: {first_line(error)}")
    lacking = step.program.bytes - step.program.chip.device_memory
    return Outcome(job, chip, step, f"lacks {lacking / GIB:.2f} GiB on each device" if lacking > 0 else None)


def first_line(error: Exception) -> str:
    """The first line that an error says, 300 characters at most."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:300]


def text(outcomes: Iterable[Outcome]) -> str:
    """One table of kernels and one of steps, and the faults."""
    outcomes = list(outcomes)
    kernels = [_kernel_cells(one.found) for one in outcomes if isinstance(one.found, Figures)]
    steps = [_step_cells(str(one.job), one.found) for one in outcomes if isinstance(one.found, Step)]
    notes = [f"{one.job} on {one.chip} is left to XLA: {one.refusal}" for one in outcomes if one.refusal]
    notes += fault_lines(outcomes)
    tables = [aligned([columns, *rows]) for columns, rows in ((KERNEL_COLUMNS, kernels), (STEP_COLUMNS, steps)) if rows]
    return "\n\n".join([*tables, *(["\n".join(notes)] if notes else [])])


def fault_lines(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each job that does not compile or does not fit."""
    return [f"{one.job} on {one.chip}: {one.fault}" for one in outcomes if one.fault]


def _kernel_cells(found: Figures) -> tuple[str, ...]:
    cells = (found.kernel, found.shape, found.dtype, found.chip, f"{found.bundles:,}")
    if found.ratio is None or found.unit_bundles is None:
        return (*cells, "-", f"{found.unit_bytes:,}", "-", "-")
    cycles = f"{GENERATIONS[found.chip].dma_cycles(found.unit_bytes):,.0f}"
    return (*cells, f"{found.unit_bundles:,.0f}", f"{found.unit_bytes:,}", cycles, f"{found.ratio:.2f} {found.bound}")


def _step_cells(job: str, found: Step) -> tuple[str, ...]:
    program, chip = found.program, found.program.chip
    kernels = ", ".join(f"{count} {name}" for name, count in found.kernels.items()) or "none"
    sizes = (f"{program.bytes / GIB:.2f}", f"{chip.device_memory / GIB:.0f}")
    return (job, chip.name, str(found.tensor), *sizes, kernels, f"{program.seconds:.0f} s")


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Rows of a table, titles first, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ((cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def markdown(outcomes: Iterable[Outcome]) -> str:
    """The tables of docs/tpu.md: a kernel and shape a row, a chip a column."""
    outcomes = list(outcomes)
    kernels = [one.found for one in outcomes if isinstance(one.found, Figures)]
    chips = [name for name in GENERATIONS if any(found.chip == name for found in kernels)]
    cells = {(found.kernel, found.shape, found.dtype, found.chip): _ratio(found) for found in kernels}
    rows = [
        (f"`{kernel}`", shape, dtype, *(cells.get((kernel, shape, dtype, chip), "") for chip in chips))
        for kernel, shape, dtype in dict.fromkeys((found.kernel, found.shape, found.dtype) for found in kernels)
    ]
    steps = [_step_cells(str(one.job), one.found) for one in outcomes if isinstance(one.found, Step)]
    tables = [piped([("kernel", "shape", "dtype", *chips), *rows])] if rows else []
    return "\n\n".join([*tables, *([piped([STEP_COLUMNS, *steps])] if steps else [])])


def _ratio(found: Figures) -> str:
    """Bundles a unit / DMA cycles a unit, and what that is; in bold where it is above 1."""
    if found.ratio is None or found.unit_bundles is None:
        return f"{found.bundles:,} in all"
    cycles = GENERATIONS[found.chip].dma_cycles(found.unit_bytes)
    ratio = f"{found.ratio:.2f}" if found.ratio <= 1 else f"**{found.ratio:.2f}**"
    return f"{found.unit_bundles:,.0f} / {cycles:,.0f} = {ratio}"


def piped(rows: list[tuple[str, ...]]) -> str:
    """The same in Markdown."""
    ruled = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in ruled)
