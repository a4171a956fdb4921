"""What one-shot callers get: the deltas of a request, joined.

Knows: how deltas join into choices. Does not know how they were made.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxinfer.errors import Cancelled, DeadlineExceeded, EngineFault, JaxInferError
from jaxinfer.request import Delta, FinishReason, Request, Timing, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a request's `n` continuations.

    `token_ids` holds every token made, a stop id included; `text` holds neither the stop string nor the text of a stop
    id. `stop_reason` is the stop string or stop id that ended it, None for an end-of-text id or a length.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timing: Timing
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """The finished answer to one request. The plain attributes are those of the first choice, except `usage`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop id that ended the first choice."""
        return self.choices[0].stop_reason

    @property
    def timing(self) -> Timing:
        """Seconds spent on the first choice."""
        return self.choices[0].timing

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """One entry per token of the first choice where logprobs were asked for."""
        return self.choices[0].logprobs

    @property
    def usage(self) -> Usage:
        """The prompt counted once, the tokens of every choice added up.

        `cached_tokens` is what the cache held before any choice ran, without the pages that the choices share.
        """
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=sum(choice.usage.completion_tokens for choice in self.choices),
            cached_tokens=min(choice.usage.cached_tokens for choice in self.choices),
        )


def collect(request: Request, deltas: Iterable[Delta]) -> Output:
    """Join all deltas of a finished request. Raises what `failure` finds in them."""
    by_choice: list[list[Delta]] = [[] for _ in range(request.params.n)]
    for delta in deltas:
        if (error := failure(delta)) is not None:
            raise error
        by_choice[delta.choice].append(delta)
    return Output(request.id, request.prompt, tuple(_join(index, parts) for index, parts in enumerate(by_choice)))


def _join(index: int, deltas: list[Delta]) -> Choice:
    last = deltas[-1]
    if last.finish is None or last.usage is None or last.timing is None:
        raise EngineFault(f"choice {index} has no end; expected a finish reason, usage and timing in its last delta")
    return Choice(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish=last.finish,
        stop_reason=last.stop_reason,
        usage=last.usage,
        timing=last.timing,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
    )


def failure(delta: Delta) -> JaxInferError | None:
    """The exception that a delta stands for, or None where its choice goes on or ended well."""
    match delta.finish:
        case FinishReason.ERROR:
            return EngineFault(delta.error or "the engine gave no reason")
        case FinishReason.DEADLINE:
            return DeadlineExceeded("the deadline passed before the request finished")
        case FinishReason.CANCELLED:
            return Cancelled("the request was cancelled")
        case _:
            return None
