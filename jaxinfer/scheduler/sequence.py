"""One choice of one request on its way: its tokens, its pages, how far the device is ahead of the host.

Two clocks run here. `tokens` holds what the host has seen; `planned` counts the positions whose keys and values a
dispatched step writes, and `in_flight` the sampled tokens that no fetch has brought yet. While a sequence decodes,
planned == len(tokens) + in_flight - 1: the newest token is chosen but not yet written.
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from jaxinfer.plan import Limits, RowParams
from jaxinfer.request import FinishReason, Request, Timing, Usage
from jaxinfer.scheduler.prefix_cache import page_name, root_name


class Sequence:
    """One choice. Waiting: no slot, no pages. Running: a slot and pages for every planned position."""

    def __init__(self, request: Request, choice: int, number: int, siblings: "Siblings", limits: Limits) -> None:
        self.request = request
        self.choice = choice
        self.siblings = siblings
        self.rank = (-request.priority, number, choice)
        self.tokens = list(request.prompt)
        self._page_size = limits.page_size
        room = longest(limits) - len(request.prompt)
        self.most_tokens = min(request.params.max_tokens, room)
        """Output tokens at which the choice ends with LENGTH."""
        self.final_pages = self.pages_for(len(request.prompt) + self.most_tokens - 1)
        """Pages it holds at the most; the last token is never written."""
        self.slot: int | None = None
        self.pages: list[int] = []
        self.planned = 0
        self.prefill_end = 0
        self.in_flight = 0
        self.published = 0
        self.admissions = 0
        self.bypassed = 0
        self.cached_tokens = 0
        self.finish: FinishReason | None = None
        self.started: float | None = None
        self.times: list[float] = []
        self._names: list[bytes] = []
        self._rows = tuple(
            RowParams(request.params, request.seed, choice, request.stop_ids, ban_stops=ban) for ban in (False, True)
        )

    # ---- lengths, tokens in flight included --------------------------------------------------------------------------

    @property
    def sampled(self) -> int:
        """Output tokens chosen so far, those in flight included."""
        return len(self.tokens) + self.in_flight - len(self.request.prompt)

    @property
    def prefilling(self) -> bool:
        """True while known tokens remain to be planned."""
        return self.planned < self.prefill_end

    @property
    def decoding(self) -> bool:
        """True where the next step has a row for it: prefilled, and not at its last token."""
        return not self.prefilling and self.sampled < self.most_tokens

    def pages_for(self, positions: int) -> int:
        """Pages that `positions` tokens fill."""
        return -(-positions // self._page_size)

    # ---- what a plan needs -------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True where it may be admitted: every token is known, and no sibling is about to publish its prompt."""
        return self.in_flight == 0 and (self.siblings.prompt_published or self.siblings.leader is self)

    @property
    def row(self) -> RowParams:
        """How its next token is chosen."""
        return self._rows[self.sampled < self.request.params.min_tokens]

    @property
    def output(self) -> List[int]:
        """The output tokens that the host knows."""
        return self.tokens[len(self.request.prompt) :]

    def names(self, count: int) -> List[bytes]:
        """Names of its first `count` full pages; computed once."""
        size = self._page_size
        while len(self._names) < count:
            at = len(self._names) * size
            parent = self._names[-1] if self._names else root_name(self.request.cache_salt)
            self._names.append(page_name(parent, self.tokens[at : at + size]))
        return self._names if len(self._names) == count else self._names[:count]

    # ---- what came back ----------------------------------------------------------------------------------------------

    def accept(self, token: int, now: float) -> FinishReason | None:
        """Append a fetched token; returns why it ends the choice, if it does."""
        self.tokens.append(token)
        self.times.append(now)
        if token in self.request.stop_ids:  # never before min_tokens: `ban_stops` forbids it on the device
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.times) >= self.most_tokens else None

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(len(self.request.prompt), len(self.times), self.cached_tokens)

    def timing(self, now: float) -> Timing:
        """Times so far; `ttft` is 0.0 where no token came."""
        arrival = self.request.arrival
        queue = (now if self.started is None else self.started) - arrival
        ttft = self.times[0] - arrival if self.times else 0.0
        gaps = tuple(late - early for early, late in zip(self.times, self.times[1:], strict=False))
        return Timing(queue=queue, ttft=ttft, itl=gaps)


@dataclass(slots=True, eq=False)
class Siblings:
    """The choices of one live request. The others wait until the leader's prompt pages can be shared."""

    choices: list[Sequence] = field(default_factory=list)
    prompt_published: bool = False
    deadline: float = math.inf

    @property
    def leader(self) -> Sequence | None:
        """The first choice that has not ended."""
        return next(self.living, None)

    @property
    def living(self) -> Iterator[Sequence]:
        """The choices that have not ended."""
        return (sequence for sequence in self.choices if sequence.finish is None)


def longest(limits: Limits) -> int:
    """Most tokens of one sequence: the context, or the pool and the last token, which is never written."""
    return min(limits.context, limits.pages * limits.page_size + 1)


def siblings_of(request: Request, number: int, limits: Limits, *, sharing: bool) -> Siblings:
    """The `params.n` choices of a request; they wait for one another only where a full page can be shared."""
    shares = sharing and request.params.n > 1 and len(request.prompt) > limits.page_size
    deadline = math.inf if request.deadline is None else request.deadline
    family = Siblings(prompt_published=not shares, deadline=deadline)
    family.choices += [Sequence(request, choice, number, family, limits) for choice in range(request.params.n)]
    return family
