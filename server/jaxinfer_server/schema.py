"""What the wire may ask for: refuses fields and enum values that nobody here knows, and lists those that are honoured.

Knows: the message types and the bounds. Does not convert (`convert.py`) and does not know the model.
"""

import json
from collections.abc import Iterator

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxinfer.errors import RequestError
from jaxinfer.request import MAX_STOP_IDS, MAX_STOP_STRINGS, REAL_BOUNDS, WHOLE_BOUNDS, Bounds, SamplingParams
from jaxinfer_server.v1 import inference_pb2 as pb

MAX_REQUEST_ID = 128
MAX_SALT = 256
MAX_MESSAGES = 4_096
DEFAULT_PARAMS = SamplingParams()

_INT_MAX = 2**31 - 1
_BOUNDS = {
    **WHOLE_BOUNDS,
    **REAL_BOUNDS,
    "stop": Bounds(0, MAX_STOP_STRINGS),
    "stop_token_ids": Bounds(0, MAX_STOP_IDS // 2),
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


def capabilities(defaults: SamplingParams = DEFAULT_PARAMS) -> list[pb.Capability]:
    """Every field of GenerateRequest that is honoured (all of them), its bounds and its value where it is unset."""
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
        found.append(_sampling_capability(field.name, getattr(defaults, field.name)))
    return found


def _sampling_capability(name: str, default: object) -> pb.Capability:
    capability = pb.Capability(field=f"sampling.{name}", default_json="" if default is None else json.dumps(default))
    if name in _BOUNDS:
        capability.minimum, capability.maximum, capability.above_minimum = _BOUNDS[name]
    return capability
