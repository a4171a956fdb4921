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

BUNDLE = re.compile(r"^ +(?:0x)?([0-9a-f]+) +(?:[A-Z]{2})? *:((?: >)*) ", re.MULTILINE)
REGION = re.compile(r"Start(?:/End empty)? region (\d+)\b")
BRANCH = re.compile(r"= sbr\.rel.*?target = \$region(\d+)")
OPERATION = re.compile(r"= ([a-z][\w.]*)")
STARTED = re.compile(r"= dma\.([a-z]+_to_[a-z]+)")
AWAITED = re.compile(r"= dma\.done\.wait (?:\([^)]*\), )?[^,]*, ([%\w]+)")


@dataclass(frozen=True)
class Loop:
    """Bundles `start` to `end` - 1, run over and over. `depth` is 1 for a loop inside no other."""

    start: int
    end: int
    depth: int
    least: int
    """Bundles of the shortest way through the body: every branch forward that stays in it is taken."""
    own: int
    """Bundles that belong to no loop inside this one."""
    started: tuple[str, ...]
    """The memories between which the DMAs that its own bundles start copy, one entry a DMA."""
    awaited: int | None
    """Bytes of all the DMAs that its own bundles wait for; None where the code computes how many."""
    busiest: str
    """The slot that its bundles fill most, and how much of it."""

    @property
    def bundles(self) -> int:
        """Bundles of the body, whatever it may skip and the loops inside it included, each counted once."""
        return self.end - self.start

    @property
    def leaf(self) -> bool:
        """Whether no loop is inside it."""
        return self.own == self.bundles


@dataclass(frozen=True)
class Schedule:
    """One kernel's code. `lines` is a text a bundle; `slots` counts, a bundle, what it fills of each unit."""

    lines: tuple[str, ...]
    delay: int
    """Bundles behind a branch that are issued before it is taken."""
    granule: int
    """Bytes of the unit in which the text counts a copy."""
    names: tuple[str, ...] = ()
    capacity: tuple[int, ...] = ()
    slots: tuple[tuple[int, ...], ...] = ()

    @property
    def bundles(self) -> int:
        """All bundles of the kernel, each counted once."""
        return len(self.lines)

    @property
    def steady(self) -> Loop | None:
        """The innermost loop with the most bundles: where a kernel of one main loop spends its time."""
        leaves = [loop for loop in self.loops if loop.leaf]
        return max(leaves, key=lambda loop: loop.bundles, default=None)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """All loops, by their start, the outer before the inner."""
        spans = sorted(self._spans(), key=lambda span: (span[0], -span[1]))
        self._check(spans)
        return tuple(self._loop(span, spans) for span in spans)

    @cached_property
    def _starts(self) -> dict[str, int]:
        return {region: at for at, line in enumerate(self.lines) for region in REGION.findall(line)}

    @cached_property
    def _branches(self) -> dict[int, int]:
        """Where each branch is, and where it leads; one that leads to a region without a mark is left out."""
        found = {at: match[1] for at, line in enumerate(self.lines) if (match := BRANCH.search(line))}
        return {at: self._starts[region] for at, region in found.items() if region in self._starts}

    def _spans(self) -> set[tuple[int, int]]:
        ends: dict[int, int] = {}
        for at, target in self._branches.items():
            if target <= at:
                ends[target] = max(ends.get(target, 0), at + self.delay + 1)
        return set(ends.items())

    def _check(self, spans: list[tuple[int, int]]) -> None:
        """Raises ValueError where the text marks a bundle as inside more loops than were found around it."""
        for at, line in enumerate(self.lines):
            marks = BUNDLE.match(line)
            depth = marks[2].count(">") if marks else 0
            found = sum(start <= at < end for start, end in spans)
            if depth > found:
                raise ValueError(f"bundle {at:#x} is marked as inside {depth} loops; {found} were found around it")

    def _loop(self, span: tuple[int, int], spans: list[tuple[int, int]]) -> Loop:
        start, end = span
        inside = [other for other in spans if other != span and start <= other[0] and other[1] <= end]
        own = [at for at in range(start, end) if not any(first <= at < last for first, last in inside)]
        return Loop(
            start,
            end,
            depth=sum(first <= start and end <= last for first, last in spans),
            least=self._shortest(start, end),
            own=len(own),
            started=tuple(kind for at in own for kind in STARTED.findall(self.lines[at])),
            awaited=self._awaited([size for at in own for size in AWAITED.findall(self.lines[at])]),
            busiest=self._busiest(range(start, end)),
        )

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
        if not self.slots:
            return ""
        full = Counter(
            {
                name: sum(self.slots[at][unit] for at in bundles) / self.capacity[unit] / len(bundles)
                for unit, name in enumerate(self.names)
            }
        )
        name, share = full.most_common(1)[0]
        return f"{name} {share:.0%}"

    def operations(self, loop: Loop | None = None) -> Counter[str]:
        """How often each operation stands in `loop`, or in the whole kernel."""
        lines = self.lines[loop.start : loop.end] if loop else self.lines
        return Counter(found for line in lines for found in OPERATION.findall(line))


def parse(text: str, utilization: str = "", *, delay: int, granule: int) -> Schedule:
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
    if not text:
        return (), (), ()
    head, _, body = text.partition("== UTILIZATION:")
    _, names, capacity = head.strip().splitlines()
    rows = tuple(tuple(map(int, line.split())) for line in body.strip().splitlines())
    if len(rows) != bundles:
        raise ValueError(f"the compiler counts the slots of {len(rows)} bundles; expected {bundles}")
    return tuple(name.strip() for name in names.split(",")), tuple(map(int, capacity.split())), rows
