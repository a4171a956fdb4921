"""What a compiled kernel costs, beside what its memory traffic costs: the numbers of one row of the table."""

from dataclasses import dataclass

import jax

from aot.bundles import Loop, Schedule
from aot.chips import Generation
from aot.compiling import Program, compile_for, mesh
from aot.kernels import Case


@dataclass(frozen=True)
class Figures:
    """One kernel at one shape on one chip. What is None is None for a kernel without a loop that waits for memory, as
    where XLA has laid what it reads into vector memory beforehand.

    bundles: of the whole kernel, each counted once. turn_bundles, turn_bytes: what one turn of its main loop issues,
    and waits for from memory. dma_cycles: how long the memory takes for that. ratio: turn_bundles / dma_cycles.
    unit_bytes: a page's (of quant_matmul the weight's, of kv_write a turn's); unit_bundles: what the main loop issues
    for as many bytes. Of int8 pages kv_write has two calls: this is the one that writes the numbers, not the scales.
    """

    kernel: str
    shape: str
    dtype: str
    chip: str
    bundles: int
    turn_bundles: int | None
    turn_bytes: int | None
    dma_cycles: float | None
    ratio: float | None
    unit_bytes: int
    unit_bundles: float | None
    busiest: str
    memory_bytes: int
    seconds: float

    @property
    def bound(self) -> str:
        """What the main loop waits for: the memory, or its own bundles."""
        if self.ratio is None:
            return ""
        return "memory" if self.ratio <= 1 else "bundles"

    def line(self) -> str:
        """One line for who tunes a kernel."""
        head = f"{self.chip} {self.kernel} [{self.shape}] {self.dtype}: {self.bundles} bundles"
        if self.turn_bundles is None:
            return f"{head}, no loop"
        turn = f"{head}, a turn {self.turn_bundles}"
        if self.ratio is None or self.unit_bundles is None:
            return f"{turn}, {self.busiest}, {self.seconds:.1f} s"
        return (
            f"{turn}, reads {self.turn_bytes:,} B = {self.dma_cycles:.0f} cycles, ratio {self.ratio:.2f}, "
            f"{self.unit_bundles:.0f} bundles a unit of {self.unit_bytes:,} B, {self.busiest}, {self.seconds:.1f} s"
        )


def measure(case: Case, chip: str) -> tuple[Figures, Schedule]:
    """Compile a case for a chip. Raises what the compiler raises."""
    program = compile_for(chip, case.jitted(mesh(chip)), *case.args)
    schedule = program.kernel(case.operation)
    return figures(case, program, schedule), schedule


def figures(case: Case, program: Program, schedule: Schedule) -> Figures:
    """The numbers of a compiled case."""
    loop = schedule.main
    bundles, read = loop.turn(copies_at_once(case, loop)) if loop else (None, None)
    read = None if program.in_vmem(largest(case)) else read
    cycles = program.chip.dma_cycles(read) if read else None
    unit = case.unit_bytes or read or 0
    return Figures(
        kernel=case.operation,
        shape=case.shape,
        dtype=case.dtype,
        chip=program.chip.name,
        bundles=schedule.bundles,
        turn_bundles=bundles,
        turn_bytes=read,
        dma_cycles=cycles,
        ratio=bundles / cycles if bundles and cycles else None,
        unit_bytes=unit,
        unit_bundles=bundles * unit / read if bundles and read else None,
        busiest=loop.busiest if loop else "",
        memory_bytes=program.bytes,
        seconds=program.seconds,
    )


def largest(case: Case) -> tuple[int, ...]:
    """The shape of the largest array that the kernel is given: the pool or the weight."""
    return max((leaf for leaf in jax.tree.leaves(case.args)), key=lambda leaf: leaf.size * leaf.dtype.itemsize).shape


def copies_at_once(case: Case, loop: Loop) -> int:
    """How often a loop of copies in `loop` runs where the code does not say: until what it fetches to is full."""
    of_one = sum(inner.awaited or 0 for inner in loop.inner if not inner.vector and inner.trips is None)
    return max(1, round(case.fetched_bytes() / of_one)) if of_one else 1


def loop_lines(schedule: Schedule, chip: Generation) -> list[str]:
    """All loops of a kernel, indented by depth; the main one is marked."""
    main = schedule.main
    return [f"{'  ' * loop.depth}{'*' if loop is main else ' '} {_loop_line(loop, chip)}" for loop in schedule.loops]


def _loop_line(loop: Loop, chip: Generation) -> str:
    trips = f"{loop.trips} times " if loop.trips else ""
    line = (
        f"{loop.start:#x}-{loop.end:#x}: {trips}{loop.bundles} bundles, {loop.own} of its own, "
        f"the shortest way {loop.shortest}, {loop.busiest}"
    )
    if loop.started:
        line += f", starts {loop.started} copies"
    if loop.awaited is None:
        return f"{line}, waits for as many bytes as it computes"
    if loop.awaited:
        return f"{line}, waits for {loop.awaited:,} B ({chip.dma_cycles(loop.awaited):.0f} cycles)"
    return line
