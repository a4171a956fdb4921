"""Reads the compiler's last words on a kernel: its VLIW bundles, the loops among them, and how full their slots are.

The text has a line for each bundle, which begins with its address and ends with the regions that start and end there:

      0x13 LB: > { %s64 = sshll.u32 %s157, 3  ;;  %v33 = vmul.f32 1.5, %v153 } /* Start region 40 */
      0x17   : > { %31 = sbr.rel (!%p28) target = $region40 }

A branch to a region that started at or before it closes a loop. The loop ends behind the branch's delay slots: bundles
that are issued before the branch is taken, 1 on v4, 4 on v5e, v5p and v6e, 6 on TPU7x. A region without a bundle may
have no mark; branches to one lead forward. The text has a > for each loop around a bundle, which proves the reading.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

BUNDLE = re.compile(r"^ *(?:0x)?([0-9a-f]+) +(?:[A-Z]{2})? *: *(>*) *\{", re.MULTILINE)
REGION = re.compile(r"Start(?:/End empty)? region (\d+)\b")
# An instruction stands behind { or ;; and comments, which quote others, do not.
OPERATION = re.compile(r"(?:\{|;;) +%\w+ = ([a-z][\w.]*)")
BRANCH = re.compile(r"(?:\{|;;) +%\w+ = sbr\.rel(?: \((!?)(%p\d+)\w*\))? target = \$region(\d+)")
STARTED = re.compile(r"(?:\{|;;) +%\w+ = dma\.[a-z]+_to_[a-z]+")
AWAITED = re.compile(r"(?:\{|;;) +%\w+ = dma\.done\.wait (?:\([^)]*\), )?[^,]*, ([%\w]+)")
VECTOR_SLOTS = frozenset({"MXU", "MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VSTORE"})  # a wait fills VLOAD
SCALAR = re.compile(
    r"(%[sp]\d+)_\w+ = (scmp\.ge|sadd\.s32|sphi|smov)[\w.]* (?:\([^),]*\), )?((?:%?\w+, )*%?\w+) ", re.MULTILINE
)


class Scalar(NamedTuple):
    """How a scalar is computed."""

    kind: str
    operands: tuple[str, ...]


NOTHING = Scalar("", ("",))


@dataclass(frozen=True)
class Loop:
    """Bundles `start` to `end` - 1, run over and over. `depth` is 1 for a loop inside no other."""

    start: int
    end: int
    depth: int
    trips: int | None
    """How often it runs, where that is a constant of the code."""
    shortest: int
    """Bundles of the shortest way through the body: every branch forward that stays in it is taken."""
    own: int
    """Bundles that belong to no loop inside this one."""
    vector: bool
    """Whether its own bundles touch vectors; a loop that does not starts copies or waits for them.

    Delay slots of the branch that closes it are left out: what comes behind the loop may begin in them.
    """
    started: int
    """DMAs that its own bundles start."""
    awaited: int | None
    """Bytes of all the DMAs that its own bundles wait for; None where the code computes how many."""
    busiest: str
    """The slot that its bundles fill most, and how much of it."""
    inner: tuple["Loop", ...]

    @property
    def bundles(self) -> int:
        """Bundles of the body, whatever it may skip and the loops inside it included, each counted once."""
        return self.end - self.start

    @property
    def waits(self) -> bool:
        """Whether its own bundles wait for a DMA."""
        return self.awaited != 0

    def turn(self, copies: int) -> tuple[int, int | None]:
        """Bundles that one run of the body issues, and bytes of the DMAs that it waits for.

        A loop inside runs as often as the code says; where it does not say, one that only starts copies or waits for
        them runs `copies` times, any other once. Both sides of a condition are counted.
        """
        bundles, awaited = self.own, self.awaited
        for loop in self.inner:
            of_one, bytes_of_one = loop.turn(copies)
            times = loop.trips or (1 if loop.vector else copies)
            bundles += times * of_one
            awaited = None if awaited is None or bytes_of_one is None else awaited + times * bytes_of_one
        return bundles, awaited


@dataclass(frozen=True)
class Schedule:
    """One kernel's code. `lines` is a text a bundle; `slots` counts, a bundle, what it fills of each unit."""

    lines: tuple[str, ...]
    delay: int
    """Bundles behind a branch that are issued before it is taken."""
    granule: int
    """Bytes of the unit in which the text counts a copy."""
    names: tuple[str, ...]
    capacity: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]

    @property
    def bundles(self) -> int:
        """All bundles of the kernel, each counted once."""
        return len(self.lines)

    @property
    def main(self) -> Loop | None:
        """The innermost loop that waits for memory and touches vectors: what a page or a block goes through.

        Where a loop only waits, or runs once, the one around it is meant; where none waits, the innermost of all.
        """
        found = max(self.loops, key=lambda loop: (loop.waits, loop.depth, loop.bundles), default=None)
        while found and (not found.vector or found.trips == 1) and (around := self._around(found)):
            found = around
        return found

    def _around(self, inner: Loop) -> Loop | None:
        return next((loop for loop in self.loops if inner in loop.inner), None)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """All loops, by their start, the outer before the inner."""
        spans = sorted(self._spans(), key=lambda span: (span[0], -span[1]))
        self._check(spans)
        made: dict[tuple[int, int], Loop] = {}
        for span in reversed(spans):
            made[span] = self._loop(span, spans, made)
        return tuple(made[span] for span in spans)

    @cached_property
    def _branches(self) -> dict[int, int]:
        """Where each branch is, and where it leads; one that leads to a region without a mark is left out."""
        starts = {region: at for at, line in enumerate(self.lines) for region in REGION.findall(line)}
        found = {at: match[3] for at, line in enumerate(self.lines) if (match := BRANCH.search(line))}
        return {at: starts[region] for at, region in found.items() if region in starts}

    def _spans(self) -> set[tuple[int, int]]:
        """First bundle of each loop, and the one behind its last. Several branches may close one loop."""
        ends: dict[str, tuple[int, int]] = {}
        for at, target in self._branches.items():
            match = BRANCH.search(self.lines[at])
            if match and target <= at:
                start, end = ends.get(match[3], (target, 0))
                ends[match[3]] = start, max(end, at + self.delay + 1)
        return set(ends.values())

    def _check(self, spans: list[tuple[int, int]]) -> None:
        """Raises ValueError where the text marks a bundle as inside more loops than were found around it."""
        for at, line in enumerate(self.lines):
            marks = BUNDLE.match(line)
            depth = len(marks[2]) if marks else 0
            found = sum(start <= at < end for start, end in spans)
            if depth > found:
                raise ValueError(f"bundle {at:#x} is marked as inside {depth} loops; {found} were found around it")

    def _loop(self, span: tuple[int, int], spans: list[tuple[int, int]], made: dict[tuple[int, int], Loop]) -> Loop:
        """`made` holds the loops inside already."""
        start, end = span
        inside = [other for other in spans if other != span and start <= other[0] and other[1] <= end]
        direct = [one for one in inside if not any(_holds(other, one) for other in inside)]
        own = [at for at in range(start, end) if not any(first <= at < last for first, last in direct)]
        return Loop(
            start,
            end,
            depth=sum(first <= start and end <= last for first, last in spans),
            trips=self._trips(end - self.delay - 1),
            shortest=self._shortest(start, end),
            own=len(own),
            vector=any(self._touches_vectors(at) for at in own if at < end - self.delay),
            started=sum(len(STARTED.findall(self.lines[at])) for at in own),
            awaited=self._awaited([size for at in own for size in AWAITED.findall(self.lines[at])]),
            busiest=self._busiest(range(start, end)),
            inner=tuple(made[span] for span in direct),
        )

    def _touches_vectors(self, at: int) -> bool:
        return any(self.slots[at][unit] for unit, name in enumerate(self.names) if name in VECTOR_SLOTS)

    def _trips(self, branch: int) -> int | None:
        """How often the loop that `branch` closes runs: of `i = 0; do { ...; i = 1 + i } while (!(i >= trips))`."""
        closing = BRANCH.search(self.lines[branch])
        if not closing or closing[1] != "!":
            return None
        test = self._definitions.get(closing[2], NOTHING)
        step = self._definitions.get(test.operands[0], NOTHING)
        last = self._definitions.get(step.operands[-1], NOTHING)
        first = self._definitions.get(last.operands[0], NOTHING)
        counts = (test.kind, step.kind, last.kind, first.kind) == ("scmp.ge", "sadd.s32", "sphi", "smov")
        if not counts or step.operands[0] != "1" or first.operands != ("0",) or not test.operands[1].isdigit():
            return None
        return int(test.operands[1])

    @cached_property
    def _definitions(self) -> dict[str, "Scalar"]:
        """Scalars and predicates by the number that names each."""
        found = SCALAR.finditer("".join(self.lines))
        return {name[1]: Scalar(name[2], tuple(re.findall(r"%[sp]\d+|\b\d+\b", name[3]))) for name in found}

    def _shortest(self, start: int, end: int) -> int:
        """Fewest bundles from `start` to `end`, going only forward."""
        left = dict.fromkeys(range(end, end + self.delay + 2), 0)
        for at in range(end - 1, start - 1, -1):
            left[at] = 1 + left[at + 1]
            target = self._branches.get(at, 0)
            if at < target <= end:
                left[at] = min(left[at], self.delay + 1 + left[target])
        return left[start]

    def _awaited(self, sizes: list[str]) -> int | None:
        return self.granule * sum(map(int, sizes)) if all(size.isdigit() for size in sizes) else None

    def _busiest(self, bundles: range) -> str:
        full = {
            name: sum(self.slots[at][unit] for at in bundles) / self.capacity[unit] / len(bundles)
            for unit, name in enumerate(self.names)
        }
        name = max(full, key=lambda name: full[name])
        return f"{name} {full[name]:.0%}"

    def operations(self, loop: Loop | None = None) -> Counter[str]:
        """How often each operation stands in `loop`, or in the whole kernel."""
        lines = self.lines[loop.start : loop.end] if loop else self.lines
        return Counter(found for line in lines for found in OPERATION.findall(line))


def _holds(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1]


def parse(text: str, utilization: str, *, delay: int, granule: int) -> Schedule:
    """What `*-final_bundles.txt` says, and with it `*-final_hlo-static-per-bundle-utilization.txt`.

    Raises ValueError for a text without bundles, or whose addresses are not 0, 1, 2, ...
    """
    matches = list(BUNDLE.finditer(text))
    addresses = [int(match[1], 16) for match in matches]
    if not addresses or addresses != list(range(len(addresses))):
        raise ValueError(f"expected bundles 0, 1, 2, ...; got {len(addresses)} of other addresses")
    edges = [match.start() for match in matches] + [len(text)]
    lines = tuple(text[first:last] for first, last in pairwise(edges))
    return Schedule(lines, delay, granule, *_slots(utilization, len(lines)))


def _slots(text: str, bundles: int) -> tuple[tuple[str, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Names of the slots, how many a bundle has of each, and how many each bundle fills."""
    head, _, body = text.partition("== UTILIZATION:")
    _, names, capacity = head.strip().splitlines()
    rows = tuple(tuple(map(int, line.split())) for line in body.strip().splitlines())
    if len(rows) != bundles:
        raise ValueError(f"the compiler counts the slots of {len(rows)} bundles; expected {bundles}")
    return tuple(name.strip() for name in names.split(",")), tuple(map(int, capacity.split())), rows
