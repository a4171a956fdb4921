"""What a compiled kernel costs, beside what its memory traffic costs: the numbers of one row of the table."""

from dataclasses import dataclass

from aot.bundles import Loop, Schedule
from aot.chips import Generation
from aot.compiling import Program, compile_for
from aot.kernels import Case


@dataclass(frozen=True)
class Figures:
    """One kernel at one shape on one chip. All but `bundles` and `memory_bytes` are of one turn of its main loop.

    loop_bundles: bundles of the loop's body; shortest: of the shortest way through it. read_bytes: what it waits
    for from HBM. dma_cycles: how long memory takes for that. ratio: loop_bundles / dma_cycles, bound by memory where
    it is at most 1. unit_bundles, unit_bytes: as much as one page takes (of quant_matmul: the whole weight).
    """

    kernel: str
    shape: str
    dtype: str
    chip: str
    bundles: int
    loop_bundles: int | None
    shortest: int | None
    read_bytes: int | None
    dma_cycles: float | None
    ratio: float | None
    unit_bytes: int
    unit_bundles: float | None
    busiest: str
    memory_bytes: int
    seconds: float

    def line(self) -> str:
        """One line for who tunes a kernel."""
        if self.loop_bundles is None:
            return f"{self._head()}: {self.bundles} bundles, no loop"
        return (
            f"{self._head()}: {self.bundles} bundles, loop {self.loop_bundles} (shortest {self.shortest}), "
            f"reads {self.read_bytes or 0:,} B = {self.dma_cycles or 0:.0f} cycles, ratio {self.ratio or 0:.2f}, "
            f"{self.unit_bundles or 0:.1f} bundles a unit of {self.unit_bytes:,} B; {self.busiest}; "
            f"{self.seconds:.1f} s"
        )

    def _head(self) -> str:
        return f"{self.chip} {self.kernel} [{self.shape}] {self.dtype}"


def measure(case: Case, chip: str) -> tuple[Figures, Schedule]:
    """Compile a case for a chip. Raises what the compiler raises."""
    program = compile_for(chip, case.jitted(), *case.args)
    schedule = program.kernel(case.operation)
    return figures(case, program, schedule), schedule


def figures(case: Case, program: Program, schedule: Schedule) -> Figures:
    """The numbers of a compiled case."""
    loop = main_loop(schedule)
    read = loop.awaited if loop else None
    cycles = program.chip.dma_cycles(read) if read else None
    return Figures(
        kernel=case.operation,
        shape=case.shape,
        dtype=case.dtype,
        chip=program.chip.name,
        bundles=schedule.bundles,
        loop_bundles=loop.bundles if loop else None,
        shortest=loop.least if loop else None,
        read_bytes=read,
        dma_cycles=cycles,
        ratio=loop.bundles / cycles if loop and cycles else None,
        unit_bytes=case.unit_bytes,
        unit_bundles=loop.bundles * case.unit_bytes / read if loop and read else None,
        busiest=loop.busiest if loop else "",
        memory_bytes=program.bytes,
        seconds=program.seconds,
    )


def main_loop(schedule: Schedule) -> Loop | None:
    """The innermost of the loops that wait for memory, else of all: the one that a page or a block goes through."""
    waiting = [loop for loop in schedule.loops if loop.awaited != 0]
    return max(waiting, key=lambda loop: (loop.depth, loop.bundles), default=schedule.steady)


def _bytes(loop: Loop, chip: Generation) -> str:
    if loop.awaited is None:
        return "as many bytes as it computes"
    return f"{loop.awaited:,} B ({chip.dma_cycles(loop.awaited):.0f} cycles)"


def loop_lines(schedule: Schedule, chip: Generation) -> list[str]:
    """All loops of a kernel, indented by depth."""
    return [
        f"{'  ' * loop.depth}loop {loop.start:#x}-{loop.end:#x}: {loop.bundles} bundles, {loop.own} of its own, "
        f"shortest {loop.least}, waits for {_bytes(loop, chip)}, "
        f"starts {len(loop.started)} copies, {loop.busiest}"
        for loop in schedule.loops
    ]
