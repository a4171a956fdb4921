"""Nothing on the wire is dropped without a word, and the capabilities say what `SamplingParams` does."""

import json
import math

import pytest

from jaxinfer.assembly import MAX_SALT_CHARS
from jaxinfer.errors import BadSamplingParam, RequestError
from jaxinfer.request import SamplingParams
from jaxinfer_server.schema import MAX_SALT, capabilities, check_known
from jaxinfer_server.v1 import inference_pb2 as pb

CAPABILITIES = {capability.field: capability for capability in capabilities()}
NUMBERS = [
    name.removeprefix("sampling.")
    for name, capability in CAPABILITIES.items()
    if name.startswith("sampling.") and capability.HasField("minimum") and "stop" not in name
]
WHOLE_NUMBERS = {"max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs"}


def sampling(name, value):
    """Parameters with one field set; min_tokens may not pass max_tokens."""
    number = int(value) if name in WHOLE_NUMBERS else float(value)
    return SamplingParams(**({"max_tokens": 2**31 - 1} | {name: number}))


def test_every_request_field_is_listed():
    outer = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} - {"sampling"}
    inner = {f"sampling.{field.name}" for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert set(CAPABILITIES) == outer | inner


@pytest.mark.parametrize("name", NUMBERS)
def test_bounds_are_those_that_are_checked(name):
    capability = CAPABILITIES[f"sampling.{name}"]
    largest = math.nextafter(capability.maximum, 0) if name == "seed" else capability.maximum  # 2^63 - 1 is no double
    sampling(name, largest)
    if capability.above_minimum:
        sampling(name, 1e-9)
    else:
        sampling(name, capability.minimum)
    below = capability.minimum if capability.above_minimum else capability.minimum - 1
    for outside in (below, capability.maximum * 2 + 1):
        with pytest.raises(BadSamplingParam, match=name):
            sampling(name, outside)


def test_bounds_of_lists_are_those_that_are_checked():
    stops, ids = (int(CAPABILITIES[f"sampling.{name}"].maximum) for name in ("stop", "stop_token_ids"))
    SamplingParams(stop=("x",) * stops, stop_token_ids=(1,) * ids)
    with pytest.raises(BadSamplingParam):
        SamplingParams(stop=("x",) * (stops + 1))
    with pytest.raises(BadSamplingParam):
        SamplingParams(stop_token_ids=(1,) * (ids + 1))


def test_defaults_are_those_of_the_dataclass():
    for name in SamplingParams.__dataclass_fields__:
        listed = CAPABILITIES[f"sampling.{name}"].default_json
        default = getattr(SamplingParams(), name)
        assert listed == ("" if default is None else json.dumps(default))


def test_the_salts_bound_is_the_assemblys():
    assert MAX_SALT == MAX_SALT_CHARS


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (pb.GenerateRequest(sampling=pb.SamplingParams.FromString(b"\xf8\x3f\x01")), "sampling"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[{}, pb.ChatMessage.FromString(b"\xf8\x3f\x01")])), "chat.messages"),
        (pb.GenerateRequest(token_ids=pb.TokenIds.FromString(b"\xf8\x3f\x01")), "token_ids"),
    ],
)
def test_an_unknown_field_is_refused_wherever_it_is(message, where):
    with pytest.raises(RequestError, match=rf"^{where} has a field number 1023"):
        check_known(message)


def test_an_unknown_enum_value_is_refused_by_name():
    message = pb.GenerateRequest.FromString(b"\x40\x07")
    with pytest.raises(RequestError, match=r"delivery is 7; expected one of .*DELIVERY_STREAM"):
        check_known(message)


def test_a_full_request_is_known():
    check_known(
        pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x", name="n")]),
            sampling=pb.SamplingParams(max_tokens=1, logit_bias={1: 2.0}, stop=["x"]),
            delivery=pb.DELIVERY_WHOLE,
        )
    )
