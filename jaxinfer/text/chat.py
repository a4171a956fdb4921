"""Messages to token ids through the checkpoint's own template.

Knows: what a message is, and that a caller's words must never become control tokens. Does not know Jinja's internals or
how text is split.

How a caller is kept from spelling control tokens: wherever one is spelled in a message (or could be completed at the
message's ends), a random number is put inside, so that in the rendered text only the template's own control tokens are
whole. The tokenizer splits there and then takes the numbers out, so what the caller wrote is encoded, unchanged, as
plain text.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.errors import RequestError
from jaxinfer.text.chat_sandbox import Refused, Sandbox
from jaxinfer.text.protocol import Tokenizer
from jaxinfer.text.reserved import ReservedTokens

MAX_DEPTH = 32
"""Nesting of values inside a message."""
MAX_ERROR = 500
"""Characters of a template's own error message that are passed on."""


class ChatTemplate:
    """The template `source`, for prompts of `tokenizer`. Raises CheckpointError where it does not compile."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self._sandbox = Sandbox(source)
        self._tokenizer = tokenizer
        self._reserved = ReservedTokens(tokenizer.reserved_tokens)
        self._special = ReservedTokens(tokenizer.special_tokens)

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the conversation up to where the assistant answers, with exactly one BOS where the model has one.

        A message has a `role` and a `content`: text, a list of `{"type": "text", "text": ...}`, or nothing, which is
        the empty text. Other fields (`name`, `tool_calls`, ...) reach the template as they are. Raises RequestError for
        anything else, and with the template's own words where it refuses the conversation.
        """
        sentinel = f"{secrets.randbelow(10**24):024}"  # digits pass unchanged through every filter and through JSON
        rendered = self._render([self._fence(message, sentinel) for message in _checked(messages)], sentinel)
        return self._tokenizer.encode(rendered, special=True, sentinel=sentinel)

    def _render(self, messages: list[dict[str, Any]], sentinel: str) -> str:
        variables = {
            "messages": messages,
            "add_generation_prompt": True,
            "bos_token": self._tokenizer.bos_token,
            "eos_token": self._tokenizer.eos_token,
            "tools": None,
            "documents": None,
        }
        try:
            return self._sandbox.render(variables)
        except (Refused, RequestError) as error:
            raise RequestError(str(error).replace(sentinel, "")[:MAX_ERROR]) from None

    def _fence(self, message: dict[str, Any], sentinel: str) -> dict[str, Any]:
        """The message with every reserved token in it broken up.

        Templates cut an assistant's earlier `<think>` from its content, so markers stay whole there; special tokens
        are broken up everywhere.
        """
        reserved = self._special if message["role"] == "assistant" else self._reserved
        return _fenced(message, reserved, sentinel)


def _fenced(value: Any, reserved: ReservedTokens, sentinel: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise RequestError(f"a message is nested more than {MAX_DEPTH} levels deep; flatten it")
    if isinstance(value, str):
        return reserved.break_up(value, sentinel)
    if isinstance(value, Mapping):
        return {
            _fenced(key, reserved, sentinel, depth + 1): _fenced(item, reserved, sentinel, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_fenced(item, reserved, sentinel, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise RequestError(f"a message holds a {type(value).__name__}; expected what JSON can hold")


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages is {messages!r:.60}; expected a list of at least one message")
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"message {index} is of type {type(message).__name__}; expected an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"message {index} has the role {role!r:.40}; expected a name such as 'user'")
    return {**message, "role": role, "content": _text(index, message.get("content"))}


def _text(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join(_part(index, part) for part in content)
    raise RequestError(f"message {index} has content of type {type(content).__name__}; expected text")


def _part(index: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise RequestError(f"message {index} has a content part that is no text; expected type 'text' with a text")
    return text
