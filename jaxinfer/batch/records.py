"""A line of the output: from finished outputs, or an error, to a JSON object in the form that was asked for.

Knows: OpenAI's response bodies and the plain record. Every record says whether it failed by its `error` alone.
"""

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from jaxinfer.batch.lines import Ask
from jaxinfer.output import Choice, Output
from jaxinfer.request import TokenLogprob, Usage

Record = dict[str, Any]


def answer(ask: Ask, outputs: Sequence[Output], model: str) -> Record:
    """The record of a line that was answered; `outputs` has one entry per prompt of the line."""
    if not ask.openai:
        return {"id": ask.id, **plain_body(outputs[0]), "error": None}
    body = _openai_body(ask, outputs, model)
    response = {"status_code": 200, "request_id": outputs[0].request_id, "body": body}
    return _envelope(ask, response, None)


def refusal(ask: Ask, message: str) -> Record:
    """The record of a line that cannot be answered as it stands."""
    return _failure(ask, message, "invalid_request", "invalid_request_error", 400)


def breakdown(ask: Ask, message: str) -> Record:
    """The record of a line that the engine could not answer, through no fault of the line."""
    return _failure(ask, message, "engine_error", "server_error", 500)


def _failure(ask: Ask, message: str, code: str, kind: str, status: int) -> Record:
    error = {"code": code, "message": message}
    if not ask.openai:
        return {"id": ask.id, "error": error}
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return _envelope(ask, {"status_code": status, "request_id": None, "body": body}, error)


def plain_body(output: Output) -> Record:
    """One output as plain JSON: the first choice at the top, all of them under `choices` where there are several."""
    several = {"choices": [_plain_choice(choice) for choice in output.choices]} if output.choices[1:] else {}
    first = _plain_choice(output.choices[0])
    del first["index"]
    return {**first, **several, "usage": _plain_usage(output.usage)}


def _plain_choice(choice: Choice) -> Record:
    logprobs = {"logprobs": [_chat_entry(entry) for entry in choice.logprobs]} if choice.logprobs else {}
    return {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish.value,
        "stop_reason": choice.stop_reason,
        **logprobs,
    }


def _plain_usage(usage: Usage) -> Record:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def _envelope(ask: Ask, response: Record, error: Record | None) -> Record:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": ask.id, "response": response, "error": error}


def _openai_body(ask: Ask, outputs: Sequence[Output], model: str) -> Record:
    chat = ask.form == "chat"
    make = _chat_choice if chat else _completion_choice
    choices = [make(choice) for output in outputs for choice in output.choices]
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{outputs[0].request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": _openai_usage([output.usage for output in outputs]),
    }


def _chat_choice(choice: Choice) -> Record:
    content = [_chat_entry(entry) for entry in choice.logprobs]
    return {
        "message": {"role": "assistant", "content": choice.text},
        "logprobs": {"content": content} if content else None,
        "finish_reason": choice.finish.value,
    }


def _completion_choice(choice: Choice) -> Record:
    return {
        "text": choice.text,
        "logprobs": _completion_logprobs(choice.logprobs) if choice.logprobs else None,
        "finish_reason": choice.finish.value,
    }


def _chat_entry(entry: TokenLogprob) -> Record:
    return {**_token(entry), "top_logprobs": [_token(other) for other in entry.top]}


def _token(entry: TokenLogprob) -> Record:
    return {"token": _spelling(entry), "logprob": entry.logprob, "bytes": list(entry.bytes)}


def _spelling(entry: TokenLogprob) -> str:
    return entry.bytes.decode(errors="replace")


def _completion_logprobs(entries: Sequence[TokenLogprob]) -> Record:
    tokens = [_spelling(entry) for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{_spelling(other): other.logprob for other in entry.top} for entry in entries],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)),
    }


def _openai_usage(usages: Sequence[Usage]) -> Record:
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }
