"""Deltas of several choices, joined into one Output."""

from jaxinfer.output import collect
from jaxinfer.request import Delta, FinishReason, Request, SamplingParams, Timing, Usage


def test_the_usage_counts_the_prompt_once_and_no_pages_shared_among_siblings_as_cached():
    request = Request("r", tuple(range(40)), SamplingParams(n=3), seed=0)
    end = {"finish": FinishReason.LENGTH, "timing": Timing(queue=0.0, ttft=1.0)}
    deltas = [Delta(i, token_ids=(7,), usage=Usage(40, i + 1, cached), **end) for i, cached in enumerate((16, 32, 32))]
    assert collect(request, deltas).usage == Usage(prompt_tokens=40, completion_tokens=6, cached_tokens=16)
