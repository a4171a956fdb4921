"""Sampling parameters: the defaults change nothing, and every bad value is refused by its name."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.errors import BadSamplingParam, RequestError
from jaxinfer.request import MAX_STOP_IDS, SamplingParams, Timing

BAD = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", 2**31),
    ("min_tokens", -1),
    ("min_tokens", 257),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    pytest.param("temperature", 10**400, id="temperature-huge"),
    ("top_k", -1),
    ("top_k", 2**31),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e-40),
    ("repetition_penalty", math.inf),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -101.0),
    ("n", 0),
    ("n", 65),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 2**64 + 5),
    ("logprobs", -1),
    ("logprobs", 21),
    ("stop", None),
    ("stop", 5),
    ("stop", "a string, not a tuple of them"),
    ("stop", ("",)),
    ("stop", ("x",) * 17),
    ("stop", ("x" * 257,)),
    ("stop", (b"x",)),
    ("stop_token_ids", None),
    ("stop_token_ids", 7),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (2**32 + 5,)),
    ("stop_token_ids", tuple(range(MAX_STOP_IDS))),
    ("logit_bias", None),
    ("logit_bias", [(1, 2.0)]),
    ("logit_bias", {-1: 0.0}),
    ("logit_bias", {2**63: 0.0}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {1: 101.0}),
    pytest.param("logit_bias", {1: 10**400}, id="logit_bias-huge"),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(BadSamplingParam, match=name) as caught:
        SamplingParams(**{name: value})
    assert "expected" in str(caught.value) or "at most" in str(caught.value)
    assert isinstance(caught.value, RequestError)


@given(
    st.floats(0, 100),
    st.integers(0, 2**31 - 1),
    st.floats(0, 1, exclude_min=True),
    st.floats(0, 1),
    st.integers(0, 2**63 - 1),
)
def test_every_value_in_range_is_kept_as_given(temperature, top_k, top_p, min_p, seed):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
    )


def test_greedy_is_temperature_zero_or_a_top_k_of_one():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(top_k=1).greedy
    assert not SamplingParams().greedy


@pytest.mark.parametrize(
    "change",
    [{"logit_bias": {1: 1.0}}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}],
)
def test_whatever_depends_on_the_tokens_so_far_needs_the_history(change):
    assert not SamplingParams().needs_history
    assert SamplingParams(**change).needs_history


def test_tpot_is_the_mean_gap_between_tokens():
    assert Timing(queue=0.0, ttft=1.0).tpot == 0.0
    assert Timing(queue=0.0, ttft=1.0, itl=(0.25, 0.75)).tpot == 0.5
