"""What scripts/gpu_aot.py compiles for an H200, and what it prints of it."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from aot import cuda
from aot.jobs import Job
from aot.kernels import Case, page_bytes
from aot.steps import StepJob, build, config_of
from aot.table import first_line
from pallas_kernels.gpu_attention import KEYS
from pallas_kernels.pages import page_shape

FORMS: Mapping[str, str] = dict.fromkeys(("paged_decode_attention", "paged_prefill_attention", "kv_write"), "gpu")
"""The Pallas forms of a bfloat16 model."""
LAYERS = 2
"""Of the models whose steps are compiled: XLA lays each layer out anew, all of them alike."""
KERNEL_COLUMNS = (
    "kernel",
    "shape",
    "dtype",
    "registers",
    "spilled",
    "shared KB",
    "programs an SM",
    "instructions",
    "a turn: issue",
    "+ tensor",
    "DMA cycles",
    "ratio",
)
STEP_COLUMNS = ("step", "calls", "MiB of temporaries", "compiled in")


@dataclass(frozen=True)
class Figures:
    """One kernel at one shape. Cycles are of a turn of its main loop, 0 where it has none.

    issue_cycles: in which a warp issues it, were nothing to be waited for. tensor_cycles: in which the SM's tensor
    cores do its products. dma_cycles: in which memory brings an SM what the turn reads, of decode attention a block of
    64 keys and values; None for other kernels. ratio: (issue_cycles + tensor_cycles) / (programs * dma_cycles), as
    those of one program follow each other, and an SM's programs go on side by side.
    """

    kernel: str
    shape: str
    dtype: str
    registers: int
    spilled: int
    shared: int
    programs: int
    instructions: int
    issue_cycles: int
    tensor_cycles: float
    dma_cycles: float | None
    ratio: float | None
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What came of one job. fault, refusal: as in `aot.table`."""

    job: Job
    found: Figures | cuda.Program | None = None
    fault: str | None = None
    refusal: str | None = None

    def record(self) -> dict[str, Any]:
        """As plain data."""
        of: dict[str, Any] = {"job": str(self.job), "fault": self.fault, "refusal": self.refusal}
        if isinstance(self.found, Figures):
            return of | asdict(self.found)
        if self.found:
            of |= {"calls": self.found.calls, "temporary_bytes": self.found.temporary_bytes}
            of |= {"device_bytes": self.found.bytes, "seconds": self.found.seconds}
        return of


def run(job: Job) -> Outcome:
    """Compile a job. What is raised while it is lowered or compiled is the outcome, whatever its type."""
    if isinstance(job, Case) and (refusal := job.refusal()):
        return Outcome(job, refusal=refusal)
    try:
        return Outcome(job, measure(job)[0] if isinstance(job, Case) else compile_step(job))
    except Exception as error:
        return Outcome(job, fault=f"{type(error).__name__}: {first_line(error)}")


def measure(case: Case) -> tuple[Figures, cuda.Program]:
    """Compile a kernel. Raises what the compiler raises."""
    program = cuda.compile_lowered(lambda: case.jitted().lower(*cuda.on(cuda.mesh(), case.args)))
    kernel = program.kernel
    loop = kernel.code.main
    issue = kernel.code.cycles(loop) if loop else 0
    tensor = kernel.code.products(loop) / cuda.TENSOR_RATE if loop else 0.0
    dma = cuda.dma_cycles(block_bytes(case)) if case.operation == "paged_decode_attention" else None
    found = Figures(
        kernel=case.operation,
        shape=case.shape,
        dtype=case.dtype,
        registers=kernel.registers,
        spilled=kernel.spilled,
        shared=kernel.shared,
        programs=kernel.programs,
        instructions=len(kernel.code.instructions),
        issue_cycles=issue,
        tensor_cycles=tensor,
        dma_cycles=dma,
        ratio=(issue + tensor) / (kernel.programs * dma) if dma else None,
        seconds=program.seconds,
    )
    return found, program


def block_bytes(case: Case) -> float:
    """Of attention: keys and values of one head that a turn reads, and their scales."""
    pages = case.args[1]
    _, _, heads, tokens, _ = page_shape(pages)
    return page_bytes(pages) / heads / tokens * KEYS


def compile_step(job: StepJob) -> cuda.Program:
    """Compile a step of the engine, of two layers, with the Pallas forms. Raises what the compiler raises."""
    config = replace(config_of(job.model), layers=LAYERS, context=job.serving.context)
    step, args, program = build(config, job.kind, job.serving, cuda.mesh(), FORMS)
    return cuda.compile_lowered(lambda: step.lower(*args, program=program))


def tables(outcomes: Iterable[Outcome]) -> list[list[tuple[str, ...]]]:
    """Rows of the table of kernels and of the table of steps, titles first; those that have any."""
    outcomes = list(outcomes)
    kernels = [_kernel_cells(one.found) for one in outcomes if isinstance(one.found, Figures)]
    steps = [_step_cells(one.job, one.found) for one in outcomes if isinstance(one.found, cuda.Program)]
    both = ((KERNEL_COLUMNS, kernels), (STEP_COLUMNS, steps))
    return [[columns, *rows] for columns, rows in both if rows]


def _kernel_cells(found: Figures) -> tuple[str, ...]:
    return (
        found.kernel,
        found.shape,
        found.dtype,
        str(found.registers),
        str(found.spilled),
        f"{found.shared / 1_024:.0f}",
        str(found.programs),
        f"{found.instructions:,}",
        f"{found.issue_cycles:,}",
        f"{found.tensor_cycles:,.0f}",
        "" if found.dma_cycles is None else f"{found.dma_cycles:,.0f}",
        "" if found.ratio is None else f"{found.ratio:.2f}",
    )


def _step_cells(job: Job, found: cuda.Program) -> tuple[str, ...]:
    calls = ", ".join(f"{found.calls.count(name)} {name}" for name in dict.fromkeys(found.calls)) or "none"
    return (str(job), calls, f"{found.temporary_bytes / 2**20:,.1f}", f"{found.seconds:.0f} s")
