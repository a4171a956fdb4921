"""Reads a CUDA kernel's machine code (SASS): its loops, and how many cycles a warp takes for a turn of one.

A line of the text is an instruction; the last number in front is how many cycles its warp waits before the next one:

   -:-:2:Y:02        /*1690*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R26

The compiler sets that number so that results of fixed latency are there in time. Results of other latency (memory,
exponentials, tensor cores) are waited for by the barriers that the fields before it name; how long is not said.
"""

import re
from dataclasses import dataclass
from functools import cached_property

INSTRUCTION = re.compile(
    r"^ +(?:[^\s:]+:){4}(?P<stall>\d+) +/\*[0-9a-f]+\*/ +(?P<guard>@!?U?P\w+ )?(?P<name>[A-Z]\S*)(?P<rest>.*)$"
)
LABEL = re.compile(r"^(\.L_\w+):")
TARGET = re.compile(r"`\((\.L_\w+)\)")
TENSOR = re.compile(r"^HGMMA\.(\d+)x(\d+)x(\d+)\.")
COPIES = ("UTMALDG", "UBLKCP", "LDGSTS")
TO_A_REGISTER = ("BRX", "JMX")
"""Jumps whose targets the text does not say."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a warp. stall: cycles until its warp issues the next. target: where a branch leads."""

    name: str
    stall: int
    guarded: bool
    target: int | None

    @property
    def products(self) -> int:
        """Multiplications and additions that it has a tensor core do, for the four warps of its group."""
        match = TENSOR.match(self.name)
        return 2 * int(match[1]) * int(match[2]) * int(match[3]) if match else 0

    @property
    def copies(self) -> bool:
        """Whether it has memory copied to shared memory."""
        return self.name.startswith(COPIES)


@dataclass(frozen=True)
class Loop:
    """Instructions that are run over and over, by their places; both sides of conditions. header: the first."""

    header: int
    body: frozenset[int]


@dataclass(frozen=True)
class Code:
    """A kernel's instructions."""

    instructions: tuple[Instruction, ...]

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """All natural loops: a branch back to an instruction that every way to the branch has passed closes one."""
        bodies: dict[int, set[int]] = {}
        for at, header in self._backward():
            if at not in self._reachable(without=header):
                bodies.setdefault(header, set()).update(self._leading(at, header))
        return tuple(Loop(header, frozenset(body)) for header, body in sorted(bodies.items()))

    @property
    def main(self) -> Loop | None:
        """The smallest loop that multiplies on tensor cores, or where none does, that copies."""
        for wanted in (lambda one: one.products > 0, lambda one: one.copies):
            found = [loop for loop in self.loops if any(map(wanted, self._of(loop)))]
            if found:
                return min(found, key=lambda loop: len(loop.body))
        return None

    def cycles(self, loop: Loop) -> int:
        """Cycles in which a warp issues one turn of a loop, were nothing to be waited for. Loops inside count once."""
        return sum(one.stall for one in self._of(loop))

    def products(self, loop: Loop) -> int:
        """Multiplications and additions of one turn on tensor cores, for the four warps of a group."""
        return sum(one.products for one in self._of(loop))

    def _of(self, loop: Loop) -> list[Instruction]:
        """Those of a loop, without loops inside that only wait: which go round as long as there is nothing to do."""
        idle = {at for inner in self.loops if inner.body < loop.body and self._waits(inner) for at in inner.body}
        return [self.instructions[at] for at in sorted(loop.body - idle)]

    def _waits(self, loop: Loop) -> bool:
        return any(self.instructions[at].name.startswith("NANOSLEEP") for at in loop.body)

    def _backward(self) -> list[tuple[int, int]]:
        reached = self._reachable(without=None)
        targets = ((at, self.instructions[at].target) for at in sorted(reached))
        return [(at, target) for at, target in targets if target is not None and target <= at]

    @cached_property
    def _next(self) -> tuple[tuple[int, ...], ...]:
        """Where each instruction may lead."""
        return tuple(map(self._after, range(len(self.instructions))))

    def _after(self, at: int) -> tuple[int, ...]:
        one = self.instructions[at]
        goes = one.name == "BRA" or one.name.startswith(("EXIT", "RET"))  # a call comes back, BRA.DIV may not be taken
        through = () if (goes and not one.guarded) or at + 1 == len(self.instructions) else (at + 1,)
        return (*through, *(() if one.target is None else (one.target,)))

    def _reachable(self, without: int | None) -> set[int]:
        """What can be reached from the first instruction by ways that do not pass `without`."""
        seen, ahead = set[int]() if without is None else {without}, [0]
        while ahead:
            at = ahead.pop()
            if at not in seen:
                seen.add(at)
                ahead += self._next[at]
        return seen if without is None else seen - {without}

    def _leading(self, at: int, header: int) -> set[int]:
        """What leads to `at` without passing `header`, both included."""
        seen, ahead = {header}, [at]
        while ahead:
            here = ahead.pop()
            if here not in seen:
                seen.add(here)
                ahead += self._before[here]
        return seen

    @cached_property
    def _before(self) -> tuple[tuple[int, ...], ...]:
        """What may lead to each instruction."""
        found: list[list[int]] = [[] for _ in self.instructions]
        for at, leads in enumerate(self._next):
            for to in leads:
                found[to].append(at)
        return tuple(map(tuple, found))


def parse(text: str) -> Code:
    """The code of the one kernel in a text. Raises ValueError where it has none, or jumps to where nobody can say."""
    found: list[re.Match[str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := INSTRUCTION.match(line):
            found.append(instruction)
    if not found or any(one["name"].startswith(TO_A_REGISTER) for one in found):
        raise ValueError(f"expected instructions whose jumps are known; got {len(found)} instructions")
    return Code(tuple(_instruction(one, labels) for one in found))


def _instruction(found: re.Match[str], labels: dict[str, int]) -> Instruction:
    target = TARGET.search(found["rest"])
    place = labels[target[1]] if target else None
    return Instruction(found["name"], int(found["stall"]), bool(found["guard"]), place)
