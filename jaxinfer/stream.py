"""Token events of one request in, Deltas out: text, log-probabilities, the end.

Knows: requests, events, detokenizers. Does not know threads, sockets or how the events are made.
"""

from collections.abc import Iterable
from dataclasses import replace

from jaxinfer.errors import EngineFault
from jaxinfer.request import Delta, FinishReason, Request, SampledToken, TokenEvent, TokenLogprob, Usage
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.protocol import Tokenizer


class RequestStream:
    """All choices of one request. Feed it that request's events in order; it answers with Deltas.

    Each choice gets exactly one Delta with `finish`, its last, which carries usage and timing. The text of the id that
    ended a choice is not part of `text`, and neither is any other special token's; their ids are in `token_ids`.

    Where a stop string hits, the text is cut before it at once and `stopped_choices` names the choice. Tokens that were
    in flight are then swallowed; the loop's own end of the choice brings the last Delta, with `finish` STOP and usage
    and timing cut to the tokens that were taken, the one that completed the stop string included.

    Joined, the bytes of `logprobs` are the text in UTF-8 (up to the stop string, where one hit): b"" for ids without
    text. Log-probabilities are not held back while a stop string may be forming; the text is.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        params = request.params
        self._request = request
        self._tokenizer = tokenizer
        self._texts = [Detokenizer(tokenizer, request.prompt, params.stop, params.min_tokens) for _ in range(params.n)]
        self._ended: set[int] = set()
        self._stopped: tuple[int, ...] = ()

    @property
    def stopped_choices(self) -> tuple[int, ...]:
        """Choices that a stop string ended in the last `feed`, and that the loop still runs: stop them there."""
        return self._stopped

    def feed(self, event: TokenEvent) -> tuple[Delta, ...]:
        """The Deltas, one or none, of one event. Raises EngineFault for an event that this request cannot have."""
        self._check(event)
        text = self._texts[event.choice]
        cut_before = text.stopped is not None
        delta = self._tokens(event, text)
        cut_now = text.stopped is not None and not cut_before
        self._stopped = (event.choice,) if cut_now and event.finish is None else ()
        if event.finish is not None:
            self._ended.add(event.choice)
            return (self._end(event, delta),)
        return (delta,) if delta.token_ids else ()

    def _check(self, event: TokenEvent) -> None:
        if event.request_id != self._request.id or not 0 <= event.choice < len(self._texts):
            raise EngineFault(f"an event of choice {event.choice} reached a request of {len(self._texts)} choices")
        if event.choice in self._ended:
            raise EngineFault(f"an event of choice {event.choice} came after its end")
        if event.finish is not None and (event.usage is None or event.timing is None):
            raise EngineFault(f"the end of choice {event.choice} came without usage or timing")

    def _tokens(self, event: TokenEvent, text: Detokenizer) -> Delta:
        """A Delta of the event's tokens, up to the one that completes a stop string."""
        pieces, ids, logprobs = [], [], []
        for token in _with_text(event):
            if text.stopped is not None:
                break
            piece = text.step(token.token)
            pieces.append(piece.text)
            ids.append(token.token)
            logprobs += self._logprobs(token, piece.data)
        if event.stop_id is not None and text.stopped is None:
            ids.append(event.stop_id)
            logprobs += self._logprobs(event.tokens[-1], b"")
        return Delta(event.choice, "".join(pieces), tuple(ids), tuple(logprobs))

    def _logprobs(self, token: SampledToken, data: bytes) -> Iterable[TokenLogprob]:
        if token.logprob is None:
            return ()
        top = tuple(TokenLogprob(other, value, self._bytes(other)) for other, value in token.top)
        return (TokenLogprob(token.token, token.logprob, data, top),)

    def _bytes(self, token: int) -> bytes:
        """An alternative's bytes; none where the model's vocabulary is padded beyond the tokenizer's."""
        return self._tokenizer.token_bytes(token) if token < self._tokenizer.vocab_size else b""

    def _end(self, event: TokenEvent, delta: Delta) -> Delta:
        text = self._texts[event.choice]
        delta = replace(delta, text=delta.text + text.finish(), usage=event.usage, timing=event.timing)
        if text.stopped is not None:
            return self._end_at_stop_string(delta, text)
        by_caller = event.stop_id in self._request.params.stop_token_ids
        stop_reason = event.stop_id if by_caller else None
        return replace(delta, finish=event.finish, stop_reason=stop_reason, error=event.error)

    @staticmethod
    def _end_at_stop_string(delta: Delta, text: Detokenizer) -> Delta:
        assert delta.usage is not None
        assert delta.timing is not None
        return replace(
            delta,
            finish=FinishReason.STOP,
            stop_reason=text.stopped,
            usage=_cut(delta.usage, text.tokens),
            timing=replace(delta.timing, itl=delta.timing.itl[: max(text.tokens - 1, 0)]),
        )


def _with_text(event: TokenEvent) -> tuple[SampledToken, ...]:
    """The event's tokens without the id that ended the choice, which has no text."""
    return event.tokens[:-1] if event.stop_id is not None else event.tokens


def _cut(usage: Usage, tokens: int) -> Usage:
    return replace(usage, completion_tokens=tokens)
