"""One request's output on its way from the engine's steps to one reader, bounded and joined.

Knows: Deltas, a reader's task, back-pressure. Lives on the asyncio side only; does not know the engine or its thread.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from jaxinfer.errors import JaxInferError, Overloaded
from jaxinfer.request import Delta, Request
from jaxinfer.stream import RequestStream
from jaxinfer.text.protocol import Tokenizer


class DeltaStream:
    """The Deltas of one running request, for one reader; ends after the last choice's end.

    What piles up between two reads comes joined, one Delta a choice. Raises what ended the request early.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, buffer: int) -> None:
        self.request = request
        self.text = RequestStream(request, tokenizer)
        self.error: JaxInferError | None = None
        self._open_choices = request.params.n
        self._pending: list[Delta] = []
        self._waiting_tokens = 0
        self._buffer = buffer * request.params.n
        self._news = asyncio.Event()
        self._reader: asyncio.Task[Any] | None = None

    @property
    def ended(self) -> bool:
        """True where no Delta will be added: every choice ended, or the request failed."""
        return self.error is not None or self._open_choices == 0

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._pending:
            if self.error is not None:
                raise self.error
            if self._open_choices == 0:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._take()

    def _take(self) -> Delta:
        """The pending Deltas of the choice that has waited longest, joined."""
        choice = self._pending[0].choice
        taken = [delta for delta in self._pending if delta.choice == choice]
        self._pending = [delta for delta in self._pending if delta.choice != choice]
        self._waiting_tokens -= sum(len(delta.token_ids) for delta in taken)
        return joined(taken)

    def put(self, deltas: Sequence[Delta]) -> None:
        """Add output. Fails the stream with Overloaded where its reader is too far behind."""
        for delta in deltas:
            self._pending.append(delta)
            self._waiting_tokens += len(delta.token_ids)
            self._open_choices -= delta.finish is not None
        if self._waiting_tokens > self._buffer and not self.ended:
            self.fail(Overloaded(f"the reader is more than {self._waiting_tokens} tokens behind; read faster"))
        self._news.set()

    def fail(self, error: JaxInferError) -> None:
        """End the stream with `error`; what was not read is dropped, and a reader stuck in a write is freed."""
        self.error = error
        self._pending.clear()
        self._news.set()
        if self._reader is not None:
            self._reader.cancel()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """While this runs, a failure cancels the task that entered, and comes out of here as the error itself."""
        self._reader = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if self.error is None or self._reader is None or self._reader.uncancel() > 0:
                raise
            raise self.error from None
        finally:
            self._reader = None


def joined(deltas: Sequence[Delta]) -> Delta:
    """One Delta for consecutive ones of one choice."""
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(itertools.chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(itertools.chain.from_iterable(delta.logprobs for delta in deltas)),
    )
