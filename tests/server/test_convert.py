"""Plain values to the wire and back are the same values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.errors import RequestError
from jaxinfer.request import Delta, FinishReason, SamplingParams, Timing, TokenLogprob, Usage
from jaxinfer_server.convert import (
    delta_from_wire,
    delta_to_wire,
    params_from_wire,
    params_to_wire,
    percentile,
    prompt_from_wire,
    prompt_to_wire,
)
from jaxinfer_server.v1 import inference_pb2 as pb

TOKENS = st.integers(0, 2**31 - 1)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(10, 2**31 - 1),
    min_tokens=st.integers(0, 10),
    temperature=st.floats(0, 100),
    top_k=TOKENS,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-100, 100),
    frequency_penalty=st.floats(-100, 100),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=5),
    seed=st.none() | st.integers(0, 2**63 - 1),
    n=st.integers(1, 64),
    stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), max_size=16).map(tuple),
    stop_token_ids=st.lists(TOKENS, max_size=8).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
SECONDS = st.floats(0, 1e6, width=32)
LOGPROB = st.builds(TokenLogprob, TOKENS, st.floats(-1e9, 0, width=32), st.binary(max_size=8))
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


@given(PARAMS)
def test_sampling_params(params):
    assert params_from_wire(over_the_wire(params_to_wire(params))) == params


def test_unset_fields_take_the_defaults():
    assert params_from_wire(pb.SamplingParams()) == SamplingParams()


def test_every_field_of_the_dataclass_is_a_field_of_the_wire():
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == set(SamplingParams.__dataclass_fields__)


@given(
    TEXT
    | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9)
    | st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}, optional={"name": TEXT}), min_size=1, max_size=4)
)
def test_prompts(prompt):
    request = pb.GenerateRequest()
    prompt_to_wire(prompt, request)
    assert prompt_from_wire(over_the_wire(request)) == prompt


def test_arrays_of_ids_are_prompts():
    request = pb.GenerateRequest()
    prompt_to_wire(np.arange(3, dtype=np.int32), request)
    assert list(request.token_ids.ids) == [0, 1, 2]


@pytest.mark.parametrize(
    "prompt",
    [
        [2**63],
        ["text"],
        [1.5],
        [True],
        [{"role": "user", "content": "x", "tool_calls": []}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ["part"]}],
        [{"role": "user", "content": "x"}, 7],
    ],
    ids=str,
)
def test_what_the_wire_has_no_field_for_is_refused(prompt):
    with pytest.raises(RequestError):
        prompt_to_wire(prompt, pb.GenerateRequest())


@given(
    st.integers(0, 63),
    TEXT,
    st.lists(TOKENS, min_size=1, max_size=5).map(tuple),
    st.lists(st.builds(TokenLogprob, TOKENS, SECONDS, st.binary(), st.lists(LOGPROB, max_size=3).map(tuple))).map(
        tuple
    ),
)
def test_output(choice, text, ids, logprobs):
    delta = Delta(choice, text, ids, logprobs)
    (message,) = delta_to_wire(delta)
    assert delta_from_wire(over_the_wire(message)) == delta


@given(
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.DEADLINE]),
    st.none() | TOKENS | TEXT,
    st.builds(Usage, TOKENS, TOKENS, TOKENS),
    st.builds(Timing, SECONDS, SECONDS, st.lists(SECONDS, max_size=9).map(tuple)),
)
def test_ends(finish, reason, usage, timing):
    delta = Delta(3, finish=finish, stop_reason=reason, usage=usage, timing=timing)
    (message,) = delta_to_wire(delta)
    assert delta_from_wire(over_the_wire(message)) == delta


def test_output_and_end_in_one_delta_are_two_messages():
    delta = Delta(0, "x", (1,), finish=FinishReason.STOP, usage=Usage(1, 1), timing=Timing(0.0, 0.0))
    assert [message.WhichOneof("event") for message in delta_to_wire(delta)] == ["chunk", "complete"]


@given(st.lists(st.floats(0, 9), min_size=1, max_size=50), st.floats(0.01, 1))
def test_percentile_is_the_smallest_value_that_covers_the_share(values, share):
    found = percentile(sorted(values), share)
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_percentile_of_nothing_is_zero():
    assert percentile([], 0.5) == 0.0
