"""Plain values to messages of the wire and back; each pair of functions is each other's inverse.

Knows: which field is which. Checks nothing that `SamplingParams` itself checks; `schema.py` looks for fields and enum
values that nobody knows. Both the service and the client use it.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from jaxinfer.errors import RequestError
from jaxinfer.request import Delta, FinishReason, SamplingParams, Timing, TokenLogprob, Usage
from jaxinfer_server.v1 import inference_pb2 as pb

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages with `role`, `content` and perhaps `name`."""

DEFAULT_PARAMS = SamplingParams()
_MESSAGE_KEYS = {"role", "content", "name"}
_PARAM_NAMES = tuple(field.name for field in fields(SamplingParams))
_REPEATED = ("stop", "stop_token_ids")
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
}
_REASONS_BACK = {number: reason for reason, number in _REASONS.items()}


def params_to_wire(params: SamplingParams) -> pb.SamplingParams:
    """Every field of `params`, defaults too, so that another version's defaults change nothing."""
    values = {name: getattr(params, name) for name in _PARAM_NAMES}
    return pb.SamplingParams(**{name: value for name, value in values.items() if value is not None})


def params_from_wire(message: pb.SamplingParams, defaults: SamplingParams = DEFAULT_PARAMS) -> SamplingParams:
    """The parameters that the message sets, and `defaults` for the others.

    Raises BadSamplingParam, naming the field, for anything out of range.
    """
    values: dict[str, Any] = {name: tuple(getattr(message, name)) for name in _REPEATED}
    values["logit_bias"] = dict(message.logit_bias)
    for name in _PARAM_NAMES:
        if name not in values and message.HasField(name):  # pyright: ignore[reportArgumentType]
            values[name] = getattr(message, name)
    return replace(defaults, **values)


def sampling_to_wire(values: Mapping[str, float | int]) -> pb.SamplingParams:
    """The fields in `values`, and no other."""
    return pb.SamplingParams(**values)  # pyright: ignore[reportArgumentType]


def is_chat(prompt: Prompt) -> bool:
    """True where `prompt` is a sequence of messages."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def chat_to_wire(messages: Sequence[Mapping[str, Any]]) -> pb.Chat:
    """Raises RequestError for a key that the wire has no field for, or a value that is no string."""
    chat = pb.Chat()
    for index, message in enumerate(messages):
        fit = isinstance(message, Mapping) and set(message) <= _MESSAGE_KEYS
        if not fit or not all(isinstance(value, str) for value in message.values()):
            raise RequestError(
                f"message {index} is {message!r:.80}; expected `role`, `content` and perhaps `name`, each a string"
            )
        chat.messages.add(**message)
    return chat


def chat_from_wire(chat: pb.Chat) -> list[dict[str, str]]:
    """The messages as templates want them. Raises RequestError where there is none."""
    if not chat.messages:
        raise RequestError("chat has no messages; expected at least one")
    return [_message_from_wire(message) for message in chat.messages]


def _message_from_wire(message: pb.ChatMessage) -> dict[str, str]:
    name = {"name": message.name} if message.HasField("name") else {}
    return {"role": message.role, "content": message.content} | name


def prompt_to_wire(prompt: Prompt, request: pb.GenerateRequest) -> None:
    """Fill `request.input`. Raises RequestError for what is neither text, ids nor messages."""
    if isinstance(prompt, str):
        request.text = prompt
    elif is_chat(prompt):
        request.chat.CopyFrom(chat_to_wire(prompt))  # pyright: ignore[reportArgumentType]
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=[_whole(token) for token in prompt]))


def _whole(token: object) -> int:
    """A token id as the wire takes it, numpy's integers too; whether it is in the vocabulary is the server's to say."""
    number = None if isinstance(token, bool) or not hasattr(token, "__index__") else operator.index(token)  # pyright: ignore
    if number is None or not -(2**63) <= number < 2**63:
        raise RequestError(f"the prompt holds {token!r:.40}; expected text, token ids or chat messages")
    return number


def prompt_from_wire(request: pb.GenerateRequest) -> Prompt:
    """Text, ids or messages. Raises RequestError where the input is not set."""
    match request.WhichOneof("input"):
        case "text":
            return request.text
        case "token_ids":
            return list(request.token_ids.ids)
        case "chat":
            return chat_from_wire(request.chat)
        case _:
            raise RequestError("input is not set; expected one of text, token_ids, chat")


def delta_to_wire(delta: Delta) -> list[pb.GenerateResponse]:
    """A chunk where there is output, and the choice's end where it ended."""
    messages = []
    if delta.text or delta.token_ids:
        messages.append(pb.GenerateResponse(chunk=_chunk(delta)))
    if delta.finish is not None:
        messages.append(pb.GenerateResponse(complete=_complete(delta)))
    return messages


def delta_from_wire(response: pb.GenerateResponse) -> Delta | None:
    """The Delta of a chunk or an end; None for `accepted`, and for an event that this client does not know."""
    if response.HasField("chunk"):
        chunk = response.chunk
        logprobs = tuple(_logprob_from_wire(entry) for entry in chunk.logprobs)
        return Delta(chunk.choice, chunk.text, tuple(chunk.token_ids), logprobs)
    if response.HasField("complete"):
        return _end_from_wire(response.complete)
    return None


def _chunk(delta: Delta) -> pb.Chunk:
    logprobs = [_logprob_to_wire(entry) for entry in delta.logprobs]
    return pb.Chunk(choice=delta.choice, text=delta.text, token_ids=delta.token_ids, logprobs=logprobs)


def _logprob_to_wire(entry: TokenLogprob) -> pb.TokenLogprob:
    top = [_logprob_to_wire(other) for other in entry.top]
    return pb.TokenLogprob(token_id=entry.token, logprob=entry.logprob, bytes=entry.bytes, top=top)


def _logprob_from_wire(entry: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        entry.token_id, entry.logprob, entry.bytes, tuple(_logprob_from_wire(other) for other in entry.top)
    )


def _complete(delta: Delta) -> pb.Complete:
    assert delta.finish is not None
    complete = pb.Complete(choice=delta.choice, finish_reason=_REASONS[delta.finish])
    if isinstance(delta.stop_reason, str):
        complete.stop = delta.stop_reason
    elif delta.stop_reason is not None:
        complete.stop_token_id = delta.stop_reason
    if (usage := delta.usage) is not None:
        complete.usage.CopyFrom(
            pb.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
            )
        )
    if delta.timing is not None:
        complete.timing.CopyFrom(_timing_to_wire(delta.timing))
    return complete


def _timing_to_wire(timing: Timing) -> pb.Timing:
    gaps = sorted(timing.itl)
    summary = pb.LatencySummary(
        count=len(gaps), mean_s=timing.tpot, p50_s=percentile(gaps, 0.50), p99_s=percentile(gaps, 0.99)
    )
    return pb.Timing(queue_s=timing.queue, ttft_s=timing.ttft, itl_s=timing.itl, itl=summary)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the sorted values do not exceed (nearest rank); 0.0 of none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _end_from_wire(complete: pb.Complete) -> Delta:
    usage, timing = complete.usage, complete.timing
    which = complete.WhichOneof("stop_reason")
    return Delta(
        choice=complete.choice,
        finish=_REASONS_BACK.get(complete.finish_reason, FinishReason.ERROR),
        stop_reason=None if which is None else getattr(complete, which),
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        timing=Timing(timing.queue_s, timing.ttft_s, tuple(timing.itl_s)),
    )
