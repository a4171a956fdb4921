"""Drives the engine's loop in the caller's thread, one step whenever somebody waits for a token.

Knows: which request each event belongs to, how many may wait, how a request is given up. Several streams may be open
at once, and one may be read inside the body of another: whoever steps, every request gets its own deltas.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

from jaxinfer.errors import EngineFault, Overloaded, RequestError
from jaxinfer.output import Output, collect
from jaxinfer.request import Delta, FinishReason, Request, TokenEvent
from jaxinfer.scheduler.loop import EngineLoop
from jaxinfer.stream import RequestStream
from jaxinfer.text.protocol import Tokenizer

Key = TypeVar("Key")
Job = tuple[Key, Sequence[Request]]
Result = tuple[Key, "Sequence[Output] | RequestError | EngineFault"]


@dataclass(slots=True)
class Ticket:
    """One request under way: the deltas that nobody has read yet, and the choices that have not ended."""

    request: Request
    stream: RequestStream
    open_choices: int
    deltas: deque[Delta] = field(default_factory=deque)

    @property
    def done(self) -> bool:
        """True once every choice has ended; unread deltas may remain."""
        return self.open_choices == 0


class Driver:
    """Steps one EngineLoop. A lock lets threads take turns, a step each; there is no thread of its own."""

    def __init__(self, loop: EngineLoop[Any], tokenizer: Tokenizer) -> None:
        self.loop = loop
        self.generated = 0
        """Tokens delivered so far, over all requests."""
        self._tokenizer = tokenizer
        self._tickets: dict[str, Ticket] = {}
        self._given_up: deque[str] = deque()
        self._lock = threading.Lock()

    def try_submit(self, request: Request) -> Ticket:
        """Queue the request. Raises Overloaded where the queue is full, PromptTooLong where the pool is too small."""
        with self._lock:
            self.loop.add(request)
            ticket = Ticket(request, RequestStream(request, self._tokenizer), request.params.n)
            self._tickets[request.id] = ticket
            return ticket

    def submit(self, request: Request) -> Ticket:
        """Queue the request, stepping until the queue has room for it."""
        while True:
            try:
                return self.try_submit(request)
            except Overloaded:
                self.step()

    def step(self) -> None:
        """Advance every request by one step. Raises EngineFault where the engine broke."""
        with self._lock, interrupts_deferred():
            self._step()

    def give_up(self, *tickets: Ticket) -> None:
        """Free the requests' slots and pages, now where nobody is stepping and in the next step otherwise.

        May be called by the garbage collector in the middle of a step, so it never waits for the lock.
        """
        self._given_up.extend(ticket.request.id for ticket in tickets if not ticket.done)
        if self._given_up and self._lock.acquire(blocking=False):
            try:
                with interrupts_deferred():
                    self._step()
            finally:
                self._lock.release()

    def run_in_order(
        self, jobs: Iterable[Job[Key]], *, window: int, on_step: Callable[[], None] = lambda: None
    ) -> Generator[Result[Key], None, None]:
        """The outputs of each job's requests, in the order of the jobs, while later jobs are already running.

        Reads `jobs` lazily: at most `window` of them are queued, running, or finished behind an unfinished one, which
        bounds the memory. A job that the pool can never hold yields its RequestError; one whose logits were no numbers
        yields its EngineFault, which is raised where the whole engine broke. Closing the iterator gives up what still
        runs.
        """
        source = iter(jobs)
        opened: deque[tuple[Key, list[Ticket] | RequestError]] = deque()
        try:
            while True:
                while len(opened) < window and (job := next(source, None)) is not None:
                    opened.append((job[0], self._open(job[1])))
                if not opened:
                    return
                key, tickets = opened[0]
                if isinstance(tickets, RequestError):
                    opened.popleft()
                    yield key, tickets
                elif all(ticket.done for ticket in tickets):
                    opened.popleft()
                    yield key, self._collect(tickets)
                else:
                    self.step()
                    on_step()
        finally:
            self.give_up(*(ticket for _, tickets in opened if isinstance(tickets, list) for ticket in tickets))

    def _open(self, requests: Sequence[Request]) -> list[Ticket] | RequestError:
        tickets: list[Ticket] = []
        try:
            for request in requests:
                tickets.append(self.submit(request))
        except RequestError as error:
            self.give_up(*tickets)
            return error
        except BaseException:  # an interrupt: nobody else knows these tickets yet
            self.give_up(*tickets)
            raise
        return tickets

    def _collect(self, tickets: Sequence[Ticket]) -> list[Output] | EngineFault:
        try:
            return [collect(ticket.request, ticket.deltas) for ticket in tickets]
        except EngineFault as error:
            if self.loop.broken:
                raise
            return error

    def _step(self) -> None:
        while self._given_up:
            request_id = self._given_up.popleft()
            self._tickets.pop(request_id, None)
            self.loop.stop(request_id, FinishReason.CANCELLED)
        for event in self.loop.step():
            self._deliver(event)

    def _deliver(self, event: TokenEvent) -> None:
        ticket = self._tickets.get(event.request_id)
        if ticket is None:
            return
        self.generated += len(event.tokens)
        for delta in ticket.stream.feed(event):
            ticket.deltas.append(delta)
            ticket.open_choices -= delta.finish is not None
        for choice in ticket.stream.stopped_choices:
            self.loop.stop(event.request_id, FinishReason.STOP, choice)
        if ticket.done:
            del self._tickets[event.request_id]


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold Ctrl-C back until the block is over: in the middle of a step it would tear the scheduler's books.

    A second Ctrl-C acts at once. Outside the main thread, where Python delivers no signals, this does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []

    def remember(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        caught.append((number, frame))

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        before(*caught[0])
