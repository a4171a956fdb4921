"""What the wire may ask for: refuses fields and enum values that nobody here knows, and lists those that are honoured.

Knows: the message types and the bounds. Does not convert (`convert.py`) and does not know the model.
"""

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxinfer.errors import RequestError
from jaxinfer.request import MAX_STOP_IDS, MAX_STOP_STRINGS, SEED_BOUND, SamplingParams
from jaxinfer_server.v1 import inference_pb2 as pb

MAX_REQUEST_ID = 128
MAX_SALT = 256
MAX_MESSAGES = 4_096

_INT_MAX = 2**31 - 1
_BOUNDS: dict[str, tuple[float, float, bool]] = {  # minimum, maximum, whether the minimum itself is refused
    "max_tokens": (1, _INT_MAX, False),
    "min_tokens": (0, _INT_MAX, False),
    "temperature": (0, 100, False),
    "top_k": (0, _INT_MAX, False),
    "top_p": (0, 1, True),
    "min_p": (0, 1, False),
    "repetition_penalty": (0.01, 100, False),
    "presence_penalty": (-100, 100, False),
    "frequency_penalty": (-100, 100, False),
    "seed": (0, SEED_BOUND - 1, False),
    "n": (1, 64, False),
    "stop": (0, MAX_STOP_STRINGS, False),
    "stop_token_ids": (0, MAX_STOP_IDS // 2, False),
    "logprobs": (0, 20, False),
}


def check_known(message: Message, path: str = "") -> None:
    """Raises RequestError, naming the field, for a field or an enum value that this server does not know.

    A newer client may ask for something by a field that did not exist when this server was built; protobuf would drop
    it without a word.
    """
    for unknown in UnknownFieldSet(message):
        where = path or type(message).__name__
        raise RequestError(
            f"{where} has a field number {unknown.field_number} that this server does not know; "
            "leave it out, or ask GetCapabilities what is honoured"
        )
    for descriptor, value in message.ListFields():
        where = f"{path}.{descriptor.name}" if path else descriptor.name
        if descriptor.enum_type is not None:
            _check_enum(descriptor, value, where)
        elif descriptor.message_type is not None:
            for part in _messages(descriptor, value):
                check_known(part, where)


def _check_enum(descriptor: FieldDescriptor, value: int, where: str) -> None:
    assert descriptor.enum_type is not None
    known = descriptor.enum_type.values_by_number
    if value not in known:
        names = ", ".join(sorted(entry.name for entry in known.values()))
        raise RequestError(f"{where} is {value}; expected one of {names}")


def _messages(descriptor: FieldDescriptor, value: object) -> Iterator[Message]:
    assert descriptor.message_type is not None
    if descriptor.message_type.GetOptions().map_entry:
        return  # the wire's maps hold plain values only
    if isinstance(value, Message):
        yield value
    else:
        yield from value  # pyright: ignore[reportGeneralTypeIssues]


def check_request_id(value: str) -> None:
    """Raises RequestError where a request id is too long."""
    if len(value) > MAX_REQUEST_ID:
        raise RequestError(f"request_id has {len(value)} characters; expected at most {MAX_REQUEST_ID}")


def check_messages(chat: pb.Chat) -> None:
    """Raises RequestError where a chat has more messages than any conversation that fits a context."""
    if len(chat.messages) > MAX_MESSAGES:
        raise RequestError(f"chat has {len(chat.messages)} messages; expected at most {MAX_MESSAGES}")


def capabilities() -> list[pb.Capability]:
    """Every field of GenerateRequest that is honoured (all of them), with default and bounds."""
    found = [
        pb.Capability(field="request_id", maximum=MAX_REQUEST_ID),
        pb.Capability(field="text"),
        pb.Capability(field="token_ids", minimum=1),
        pb.Capability(field="chat", minimum=1, maximum=MAX_MESSAGES),
        pb.Capability(field="cache_salt", maximum=MAX_SALT, default_json='""'),
        pb.Capability(field="priority", minimum=-(2**31), maximum=_INT_MAX, default_json="0"),
        pb.Capability(field="delivery", default_json='"DELIVERY_STREAM"'),
        pb.Capability(field="return_prompt_ids", default_json="false"),
    ]
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        found.append(_sampling_capability(field.name))
    return found


def _sampling_capability(name: str) -> pb.Capability:
    capability = pb.Capability(field=f"sampling.{name}", default_json=_default_json(name))
    if name in _BOUNDS:
        capability.minimum, capability.maximum, capability.above_minimum = _BOUNDS[name]
    return capability


def _default_json(name: str) -> str:
    field = next(field for field in fields(SamplingParams) if field.name == name)
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return "" if default is None else json.dumps(default)
