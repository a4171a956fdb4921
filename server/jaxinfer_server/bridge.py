"""The hall between asyncio and the engine: one thread runs the loop, streams of Deltas come out on the other side.

Knows: threads, back-pressure, the end of the engine thread. The engine thread hands over once a step, whatever the
number of tokens; text is made on the asyncio side, while the device computes the next step. Does not know gRPC or HTTP.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jaxinfer.errors import EngineFault, JaxInferError, Unavailable
from jaxinfer.request import FinishReason, Request, TokenEvent
from jaxinfer.scheduler.loop import EngineLoop
from jaxinfer.text.protocol import Tokenizer
from jaxinfer_server.delta_stream import DeltaStream

T = TypeVar("T")
Loop = EngineLoop[Any]
Events = Sequence[TokenEvent]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BridgeLimits:
    """buffer: tokens per choice that may wait for a slow reader. stall: seconds without progress until not ready."""

    buffer: int = 2_048
    stall: float = 60.0


class Bridge:
    """Owns the engine thread. Every method runs on the asyncio side.

    After the engine thread's death every open stream raises EngineFault and every new one Unavailable.
    """

    def __init__(self, loop: Loop, tokenizer: Tokenizer, limits: BridgeLimits | None = None) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._limits = limits or BridgeLimits()
        self._streams: dict[str, DeltaStream] = {}
        self._readers = 0
        self._numbers = itertools.count()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._draining = False
        self._answers: set[asyncio.Future[Any]] = set()
        self._fault: BaseException | None = None
        self._working = False
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread; the running asyncio loop is the one that gets the output."""
        self._asyncio = asyncio.get_running_loop()
        self._thread.start()

    @property
    def ready(self) -> bool:
        """True where new requests would be taken and the engine makes progress."""
        return self._thread.is_alive() and self._fault is None and not self._draining and not self.stalled

    @property
    def stalled(self) -> bool:
        """True where work is running and no step has ended for `limits.stall` seconds."""
        return self._working and time.monotonic() - self._progress > self._limits.stall

    @property
    def running(self) -> int:
        """Requests whose last choice has not ended."""
        return len(self._streams)

    @property
    def open_streams(self) -> int:
        """Requests that are being read: running, or ended with output that nobody has taken yet."""
        return self._readers

    def check_open(self) -> None:
        """Raises Unavailable where no request is taken: draining, closed, or the engine is down."""
        if self._fault is not None:
            raise Unavailable("the engine stopped after an internal error; use another server")
        if self._draining or self._closing:
            raise Unavailable("the server is draining and takes no new request; use another server")

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[DeltaStream]:
        """Queue the request and read its output; leaving early stops it within one step.

            async with bridge.stream(request) as deltas:
                async for delta in deltas: ...

        Raises PromptTooLong, Overloaded or Unavailable before anything runs, and whatever ends the request early.
        """
        self.check_open()
        request = replace(request, id=f"{next(self._numbers)}:{request.id}")  # a caller may send an id twice
        stream = DeltaStream(request, self._tokenizer, self._limits.buffer)
        self._streams[request.id] = stream
        self._readers += 1
        try:
            await self._ask(lambda: self._loop.add(request))
            async with stream.reading():
                yield stream
        finally:
            self._readers -= 1
            if self._streams.pop(request.id, None) is not None:
                self._stop(request.id)

    def abort(self, request_id: str) -> bool:
        """Stop the running requests with this id: their open choices end as CANCELLED. False where there is none."""
        found = [key for key in self._streams if key.partition(":")[2] == request_id]
        for key in found:
            self._stop(key)
        return bool(found)

    async def stats(self) -> Any:
        """The loop's counters, read between two steps."""
        return await self._ask(self._loop.stats)

    async def drain(self, grace: float) -> bool:
        """Take no new request and wait until the others are read to their end; False where `grace` seconds pass."""
        self._draining = True
        deadline = time.monotonic() + grace
        while self._readers and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return self._readers == 0

    async def close(self, wait: float = 5.0) -> None:
        """End the streams that are left with Unavailable, and the thread after its step; `wait` seconds at most."""
        self._draining = True
        self._fail_all(Unavailable("the server stopped before the request was done; send it again elsewhere"))
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, wait)
        if self._thread.is_alive():
            _log.error("the engine thread did not end within %s seconds; it is left behind", wait)

    # ---- asyncio side to engine thread -------------------------------------------------------------------------------

    def _stop(self, key: str, choice: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self._post(lambda: self._loop.stop(key, reason, choice))

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    async def _ask(self, question: Callable[[], T]) -> T:
        """Run `question` on the engine thread, between two steps."""
        if self._fault is not None or self._closing:
            raise Unavailable("the engine has stopped")
        answer: asyncio.Future[T] = self._asyncio.create_future()

        def command() -> None:
            try:
                result = question()
            except EngineFault:
                raise
            except JaxInferError as error:
                self._hand_over(_settle, answer, error)
            else:
                self._hand_over(_settle, answer, None, result)

        self._answers.add(answer)
        self._post(command)
        try:
            return await answer
        finally:
            self._answers.discard(answer)

    # ---- the engine thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._await_work():
                if self._loop.busy or self._loop.broken:
                    self._step()
        except BaseException as error:
            _log.critical("the engine thread ended", exc_info=error)
            self._fault = error
            self._hand_over(self._fail_all, EngineFault("the engine stopped after an internal error"))

    def _step(self) -> None:
        events = self._loop.step()  # a broken loop delivers its last events, and raises the next time
        self._progress = time.monotonic()
        if events:
            self._hand_over(self._deliver, events)

    def _await_work(self) -> bool:
        """Run the waiting commands, sleeping while there is nothing to do at all; False at the end."""
        with self._wake:
            if not self._loop.busy and not self._loop.broken:
                self._sleep()
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return not self._closing

    def _sleep(self) -> None:
        self._working = False
        self._wake.wait_for(lambda: self._commands or self._closing)
        self._progress, self._working = time.monotonic(), True

    def _hand_over(self, call: Callable[..., None], *arguments: Any) -> None:
        if not self._asyncio.is_closed():  # else this thread was left behind by `close`
            self._asyncio.call_soon_threadsafe(call, *arguments)

    # ---- engine thread to asyncio side -------------------------------------------------------------------------------

    def _deliver(self, events: Events) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:  # else it was given up before this step ended
                self._feed(stream, event)
                if stream.ended:
                    del self._streams[event.request_id]

    def _feed(self, stream: DeltaStream, event: TokenEvent) -> None:
        try:
            stream.put(stream.text.feed(event))
        except Exception as error:  # one request's text must not take the others down
            _log.exception("the output of a request could not be made into text", exc_info=error)
            stream.fail(EngineFault("the output could not be made into text"))
        for choice in stream.text.stopped_choices:
            self._stop(event.request_id, choice, FinishReason.STOP)
        if stream.error is not None:
            self._stop(event.request_id)

    def _fail_all(self, error: JaxInferError) -> None:
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.fail(error)
        for answer in self._answers:
            _settle(answer, error)


def _settle(answer: "asyncio.Future[T]", error: JaxInferError | None, result: Any = None) -> None:
    if answer.done():  # its asker went away, or everything failed at once
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
