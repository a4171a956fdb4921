"""Reading `rope_scaling` and `rope_parameters`: every kind, spelling and default; what is refused, by name."""

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import RopeConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families.fields import Fields
from jaxinfer.model.families.ropes import rope_from_hf, stretched_context, yarn_growth, yarn_scale
from jaxinfer.model.rope import rope_phases

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ropes.json").read_text())["cases"]
HEAD = 8
TOP = {"max_position_embeddings": 512, "rope_theta": 500_000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "short_factor": [1, 1.5], "long_factor": [1.0, 4.0]}
GROWN = 0.1 * math.log(4) + 1


def read(spec: Any, partial: bool = False, **top: Any) -> RopeConfig:
    return rope_from_hf(Fields({**TOP, "rope_scaling": spec, **top}, "config.json"), HEAD, partial=partial)


def rope(kind: Any, **fields: Any) -> RopeConfig:
    return RopeConfig(**{"theta": 500_000.0, "kind": kind, **fields})


def test_every_spelling_of_a_rope_is_the_same() -> None:
    old = {**{name: value for name, value in LLAMA3.items() if name != "rope_type"}, "type": "llama3"}
    whole = {**LLAMA3, "rope_theta": 500_000.0}
    expected = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=512)
    assert read(LLAMA3) == read(old) == read({**LLAMA3, "type": "llama3"}) == expected
    assert read(None, rope_parameters=whole, rope_theta=None) == expected
    assert read(LLAMA3, rope_parameters=whole) == expected
    assert read(None, rope_parameters=whole, rope_theta=10.0) == expected  # what is inside the object wins


def test_a_file_without_a_rope_has_the_familys_theta() -> None:
    fields = Fields({"max_position_embeddings": 512}, "config.json")
    assert rope_from_hf(fields, HEAD) == RopeConfig(theta=10_000.0)
    assert rope_from_hf(fields, HEAD, theta=1e6) == RopeConfig(theta=1e6)
    assert read({"rope_type": "default"}) == read({}) == read({"type": None}) == rope("default")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"type": "linear", "factor": 2}, rope("linear", factor=2.0)),
        ({"type": "dynamic", "factor": 4.0}, rope("dynamic", factor=4.0, original_context=512)),
        ({**LLAMA3, "original_max_position_embeddings": 64}, read({**LLAMA3}, original_max_position_embeddings=64)),
        (YARN, rope("yarn", factor=4.0, original_context=64, attention_factor=GROWN)),
        (
            {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 0.8},
            rope(
                "yarn", factor=4, original_context=64, beta_fast=16, beta_slow=2, truncate=False, attention_factor=0.8
            ),
        ),
        (
            {**YARN, "factor": None},  # by how much the positions outgrow the original context
            rope("yarn", factor=8.0, original_context=64, attention_factor=0.1 * math.log(8) + 1),
        ),
        ({"type": "yarn", "factor": 1.0}, rope("yarn", factor=1.0, original_context=512)),
    ],
)
def test_a_kind_and_its_defaults(spec: dict[str, Any], expected: RopeConfig) -> None:
    assert read(spec) == expected


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "attention_factor"),
    [
        (1.0, 1.0, 1.0),
        (0.707, 0.5, (0.0707 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        (0.707, 0, GROWN),  # as if neither were there
        (0.707, None, GROWN),
        (None, 0.707, GROWN),
    ],
)
def test_yarns_two_mscales(mscale: float | None, mscale_all_dim: float | None, attention_factor: float) -> None:
    spec = {**YARN, "mscale": mscale, "mscale_all_dim": mscale_all_dim}
    assert read(spec).attention_factor == pytest.approx(attention_factor, rel=1e-12)
    growth = yarn_growth(Fields({"rope_scaling": spec}, "config.json"), read(spec))
    assert growth == pytest.approx((0.1 * (mscale_all_dim or 0) * math.log(4) + 1) ** 2)


def test_yarn_scale_grows_with_the_stretch_alone() -> None:
    assert yarn_scale(1.0) == yarn_scale(0.5) == yarn_scale(40.0, mscale=0.0) == 1.0
    assert yarn_scale(40.0, 0.707) == pytest.approx(1.2608, abs=1e-4)  # DeepSeek V2's


@pytest.mark.parametrize(
    ("more", "attention_factor"),
    [
        ({}, math.sqrt(1 + math.log(8) / math.log(64))),  # positions / original context
        ({"factor": 2.0}, math.sqrt(1 + math.log(2) / math.log(64))),
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 1.25}, 1.25),
    ],
)
@pytest.mark.parametrize("spelling", ["longrope", "su"])
def test_longrope(more: dict[str, Any], attention_factor: float, spelling: str) -> None:
    spec = {**LONG, "rope_type": spelling, **more}
    got = read(spec, partial=True, partial_rotary_factor=0.5, original_max_position_embeddings=64)
    assert got.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    assert (got.kind, got.dim, got.original_context) == ("longrope", 4, 64)
    assert (got.short_factors, got.long_factors) == ((1.0, 1.5), (1.0, 4.0))


def test_the_original_context_beside_the_object_wins() -> None:
    """Phi-3 keeps it there; transformers prefers it to the object's own."""
    assert read(YARN, original_max_position_embeddings=128).original_context == 128
    assert read({"rope_type": "yarn", "factor": 4.0}).original_context == 512


@pytest.mark.parametrize(
    ("inside", "beside", "dim"), [(0.5, None, 4), (None, 0.5, 4), (0.25, 0.5, 2), (1.0, 0.5, None), (None, None, None)]
)
def test_part_of_a_head(inside: float | None, beside: float | None, dim: int | None) -> None:
    spec = {"rope_type": "default", "partial_rotary_factor": inside}
    assert read(spec, partial=True, partial_rotary_factor=beside).dim == dim


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"rope_type": "mrope"}, "mrope"),
        ({"rope_type": "proportional"}, "proportional"),
        ({"rope_type": ["llama3"]}, "rope"),
        ({"type": "linear", "rope_type": "llama3", "factor": 2.0}, "linear"),
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": 0.5}, "attention_factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}, "original_max_position"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "mrope_section": [1, 1, 2]}, "mrope_section"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({**LLAMA3, "factor": float("nan")}, "factor"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor"),
        ({**LLAMA3, "original_max_position_embeddings": 0.5}, "original_max_position_embeddings"),
        ({**YARN, "truncate": 0}, "truncate"),
        ({**YARN, "mscale": "1"}, "mscale"),
        ({**YARN, "beta_slow": 33}, "beta_slow"),
        ({**YARN, "beta_slow": 1e-9}, "beta_slow"),
        ({**YARN, "rope_theta": 1.0}, "theta"),
        ({**LONG, "short_factor": None}, "short_factor"),
        ({**LONG, "long_factor": [1.0, "2"]}, "long_factor"),
        ({**LONG, "long_factor": [1.0, 0.0]}, "long_factor"),
        ({**LONG, "long_factor": [1.0]}, "long_factors"),
        ({**LONG, "long_mscale": 1.2}, "long_mscale"),
        ("llama3", "rope_scaling"),
    ],
)
def test_a_rope_that_nobody_implemented_is_refused_by_name(spec: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(spec)


@pytest.mark.parametrize(
    ("top", "named"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"original_max_position_embeddings": -1}, "original_max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters and rope_scaling"),
    ],
)
def test_what_stands_beside_the_object_is_refused_by_name(top: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(YARN, **top)


def test_an_odd_part_of_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="rope dim is 3"):
        read({}, partial=True, partial_rotary_factor=0.4)


def test_the_context_of_a_stretched_rope() -> None:
    """Qwen 2.5's files say 32,768 whether yarn is on or not; DeepSeek's and Llama's say what comes out."""
    assert stretched_context(read(YARN, max_position_embeddings=64), 64) == 256
    assert stretched_context(read(YARN), 512) == 512
    assert stretched_context(read({"rope_type": "dynamic", "factor": 2.5}), 512) == 1280
    for spec in (LLAMA3, {"rope_type": "linear", "factor": 4.0}, {**LONG, "factor": 8.0}, {}):
        assert stretched_context(read(spec), 512) == 512


@pytest.mark.parametrize("name", GOLDEN)
def test_a_file_gives_the_phases_that_transformers_gives(name: str) -> None:
    """At 0, 1, the original context - 1, itself and 4 times it, from the file of transformers 5 and that of 4.

    Within 1e-6, and 2^-21 of the angle: transformers makes the frequencies themselves in float32, so they are off by up
    to 3 units in the last place of 24, and both sides round the product. At 4 times the original context a pair of one
    radian a token has 16,384 radians and so a tolerance of 0.008; the slow pairs, which tell far tokens apart, 1e-5.
    """
    case = GOLDEN[name]
    ropes = [
        rope_from_hf(Fields(case[form], form), 32, partial="part of a head" in name) for form in ("config", "older")
    ]
    assert ropes[0] == ropes[1]
    angles = np.array(case["positions"])[:, None] * np.array(case["frequency"])
    for wanted, got in zip((case["cosine"], case["sine"]), phases_by_length(ropes[0], case["positions"]), strict=True):
        off = np.abs(np.array(wanted) - got)
        assert (off <= 1e-6 + angles * 2**-21).all(), off.max()
        assert off[:, -1].max() <= 1e-5


def phases_by_length(rope: RopeConfig, positions: list[int]) -> np.ndarray:
    """[2, position, pair]: each as the last token of a sequence; longrope is asked of short sequences and long ones."""
    short = [position for position in positions if position < rope.original_context]
    long = [position for position in positions if position >= rope.original_context]
    asked = [(short, rope.original_context), (long, positions[-1] + 1)]
    both = [rope_phases(rope, 32, jnp.array([some], jnp.int32), context) for some, context in asked if some]
    return np.concatenate([np.stack(phases)[:, 0] for phases in both], axis=1)
