"""A line of the input: from bytes to what it asks for.

Knows: the two kinds of line (OpenAI's batch lines and plain ones), every field that is honoured, and that any other
field is refused by name. Does not know the model: ids and lengths are checked when the request is made.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NoReturn

from jaxinfer.errors import RequestError
from jaxinfer.request import SamplingParams

if TYPE_CHECKING:  # a client of a server formats records too, and needs no JAX for it
    from jaxinfer.assembly import Prompt

MAX_LINE_BYTES = 16 * 2**20
MAX_NESTING = 32  # of lists and objects; no field needs more than 5, and Python's own walks end in a crash at 1000
BOM = b"\xef\xbb\xbf"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAMPLING = frozenset(field.name for field in fields(SamplingParams))
NEUTRAL: Mapping[str, tuple[Any, ...]] = {"stream": (False,), "echo": (False,), "suffix": ("",), "best_of": (1,)}
"""OpenAI fields that are accepted only with the values that ask for nothing."""

DEFAULT_PARAMS = SamplingParams()

Form = Literal["plain", "completion", "chat"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not blank; `number` counts all lines of the file from 1. Longer than MAX_LINE_BYTES: cut."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Ask:
    """What one line asks for: `params` for each of `prompts`, to be answered in `form` under `id`.

    `error` says why it cannot be asked; `prompts` is then empty.
    """

    id: Any
    form: Form
    openai: bool = False
    prompts: tuple["Prompt", ...] = ()
    params: SamplingParams = DEFAULT_PARAMS
    error: str = ""


def read_lines(file: BinaryIO) -> Iterator[Line]:
    """The lines of `file`, one at a time: byte order mark and line ends taken off, blank lines left out."""
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        rest = data
        while not rest.endswith(b"\n") and (rest := file.readline(2**20)):
            pass
        data = data.removeprefix(BOM) if number == 1 else data
        if data.strip():
            yield Line(number, data)


def parse_line(line: Line, defaults: SamplingParams, is_model: Callable[[str], bool]) -> Ask:
    """What the line asks for; fields that it leaves out come from `defaults`. Never raises: see `Ask.error`."""
    unnamed = f"line-{line.number}"
    try:
        record = _json_object(line.data)
    except RequestError as error:
        return Ask(unnamed, "plain", error=str(error))
    if record.keys() & {"custom_id", "url", "body"}:
        form: Form = "chat" if record.get("url") == CHAT else "completion"
        blank = Ask(record.get("custom_id"), form, openai=True)
        read = _openai
    else:
        blank = Ask(record.get("id", unnamed), "plain")
        read = _plain
    try:
        return read(record, blank, defaults, is_model)
    except RequestError as error:
        return replace(blank, error=str(error))


def _json_object(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_LINE_BYTES:
        raise RequestError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        record = json.loads(
            data.decode(), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_no_name_twice
        )
    except UnicodeDecodeError as error:
        raise RequestError(f"the line is no UTF-8: byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise RequestError(f"the line is a JSON {type(record).__name__}; expected an object")
    if _nests_deeper(record, MAX_NESTING):
        raise RequestError(f"the line nests lists and objects more than {MAX_NESTING} deep")
    return record


def _nests_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        parts = (part for whole in level for part in (whole.values() if isinstance(whole, dict) else whole))
        level = [part for part in parts if isinstance(part, dict | list)]
    return bool(level)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    """A number too large for a float would be infinity, and an id echoed as `Infinity`, which is no JSON."""
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits:.40} is too large a number")
    return number


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"{twice!r:.80} is given twice; expected each field once")
    return record


def _plain(record: dict[str, Any], blank: Ask, defaults: SamplingParams, is_model: Callable[[str], bool]) -> Ask:
    if not isinstance(blank.id, str | int) or isinstance(blank.id, bool):
        raise RequestError(f"id is {blank.id!r:.40}; expected text or a whole number")
    given = {name: value for name, value in record.items() if name not in ("id", "prompt", "messages")}
    if ("prompt" in record) == ("messages" in record):
        raise RequestError("expected exactly one of prompt and messages")
    prompt = _messages(record["messages"]) if "messages" in record else record["prompt"]
    return replace(blank, prompts=(prompt,), params=_params(given, defaults))


def _openai(record: dict[str, Any], blank: Ask, defaults: SamplingParams, is_model: Callable[[str], bool]) -> Ask:
    if unknown := sorted(record.keys() - {"custom_id", "method", "url", "body"}):
        raise RequestError(f"unknown field {unknown[0]!r:.80} beside body")
    if not isinstance(blank.id, str) or not blank.id:
        raise RequestError(f"custom_id is {blank.id!r:.40}; expected text")
    if record.get("method", "POST") != "POST":
        raise RequestError(f"method is {record['method']!r:.40}; expected POST")
    if record.get("url") not in (COMPLETIONS, CHAT):
        raise RequestError(f"url is {record.get('url')!r:.80}; expected {COMPLETIONS} or {CHAT}")
    if not isinstance(body := record.get("body"), dict):
        raise RequestError(f"body is {body!r:.40}; expected an object")
    body = {name: value for name, value in body.items() if value is not None}
    model = body.pop("model", None)
    if model is not None and not (isinstance(model, str) and is_model(model)):
        raise RequestError(f"model is {model!r:.80}; that model is not the one loaded")
    for name in NEUTRAL.keys() & body.keys():
        if body[name] not in NEUTRAL[name]:
            raise RequestError(f"{name} is {body[name]!r:.40}; a batch line cannot have it")
        del body[name]
    prompts = (_messages(body.pop("messages", None)),) if blank.form == "chat" else _prompts(body.pop("prompt", None))
    if blank.form == "chat":
        _rename_chat_fields(body)
    return replace(blank, prompts=prompts, params=_params(body, defaults))


def _messages(value: Any) -> "Prompt":
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise RequestError(f"messages is {value!r:.40}; expected a list of objects with role and content")
    return value


def _prompts(value: Any) -> "tuple[Prompt, ...]":
    """OpenAI's four kinds of prompt: text, texts, ids, lists of ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        return (value,)
    if isinstance(value, list) and value and all(isinstance(prompt, str | list) for prompt in value):
        return tuple(value)
    raise RequestError(f"prompt is {value!r:.40}; expected text, token ids, or a list of them")


def _rename_chat_fields(body: dict[str, Any]) -> None:
    """Chat bodies say max_completion_tokens, and logprobs: true with top_logprobs: k."""
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise RequestError("max_tokens and max_completion_tokens are the same; expected one of them")
        body["max_tokens"] = body.pop("max_completion_tokens")
    wanted = body.pop("logprobs", False)
    if not isinstance(wanted, bool):
        raise RequestError(f"logprobs is {wanted!r:.40}; expected true or false")
    if not wanted and "top_logprobs" in body:
        raise RequestError("top_logprobs is given without logprobs: true")
    if wanted:
        body["logprobs"] = body.pop("top_logprobs", 0)


def _params(given: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """`defaults` with the given fields; null leaves a field unset. Raises RequestError for a field not honoured."""
    if unknown := sorted(given.keys() - SAMPLING):
        raise RequestError(f"unknown field {unknown[0]!r:.80}; expected one of {', '.join(sorted(SAMPLING))}")
    values = {name: value for name, value in given.items() if value is not None}
    if "stop" in values:
        values["stop"] = (values["stop"],) if isinstance(values["stop"], str) else _tuple("stop", values["stop"])
    if "stop_token_ids" in values:
        values["stop_token_ids"] = _tuple("stop_token_ids", values["stop_token_ids"])
    if "logit_bias" in values:
        values["logit_bias"] = _bias(values["logit_bias"])
    return replace(defaults, **values)


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise RequestError(f"{name} is {value!r:.40}; expected a list")
    return tuple(value)


def _bias(value: Any) -> dict[int, Any]:
    """JSON's keys are text; ids of more than 19 digits are refused before `int` would chew on them."""
    if not isinstance(value, dict):
        raise RequestError(f"logit_bias is {value!r:.40}; expected an object of token id to number")
    for token in value:
        digits = token.removeprefix("-")
        if len(token) > 19 or not digits.isascii() or not digits.isdigit():
            raise RequestError(f"logit_bias key is {token!r:.40}; expected a token id")
    return {int(token): bias for token, bias in value.items()}
