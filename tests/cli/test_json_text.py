"""What the commands print as JSON: also where a model's numbers are not finite."""

import json
import math

import pytest

from jaxinfer.cli.json_text import json_text


def test_plain_data_comes_back_as_it_was():
    value = {"name": "ö", "sizes": [1, 2.5, -0.0, True, None], "inside": {"rows": [[], {}]}}
    assert json.loads(json_text(value)) == value
    assert json_text((1, (2,))) == "[1, [2]]"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null(number: float):
    assert json_text({"parts": ({"difference": number}, number), "finite": 1.5}) == (
        '{"parts": [{"difference": null}, null], "finite": 1.5}'
    )
