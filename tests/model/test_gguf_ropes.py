"""Reading a GGUF file's rope: llama.cpp's metadata, and the tensors that hold what frequencies are divided by."""

from typing import Any

import numpy as np
import pytest

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families.fields import Fields
from jaxinfer.model.families.gguf_ropes import ROPE_FACTORS, ROPE_FREQS, rope_from_gguf, with_rope_factors
from jaxinfer.model.families.ropes import yarn_scale
from jaxinfer.model.rope import rope_frequencies

HEAD = 64
SHORT, LONG = ROPE_FACTORS
FACTORS = {SHORT: (HEAD // 2,), LONG: (HEAD // 2,)}
YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64}
SIZES = {"vocab_size": 9, "width": 64, "layers": 1, "heads": 1, "kv_heads": 1, "mlp_width": 8, "context": 512}
MODEL = ModelConfig(family="llama", head_dim=HEAD, query_scale=1.0, **SIZES)


def read(metadata: dict[str, Any], shapes: Any = (), **how: Any) -> RopeConfig:
    fields = {"phi3.context_length": 512, **{f"phi3.rope.{name}": value for name, value in metadata.items()}}
    return rope_from_gguf(Fields(fields, "GGUF metadata"), dict(shapes), "phi3", HEAD, **how)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, RopeConfig()),
        ({"freq_base": 5e5, "dimension_count": HEAD}, RopeConfig(5e5)),
        ({"scaling.type": "none"}, RopeConfig()),
        ({"scaling.type": "linear", "scaling.factor": 2.0}, RopeConfig(kind="linear", factor=2.0)),
        ({"scaling.factor": 2.0}, RopeConfig(kind="linear", factor=2.0)),  # a file without a type is linear
        ({"scale_linear": 2.0}, RopeConfig(kind="linear", factor=2.0)),  # the older name
        ({"scale_linear": 2.0, "scaling.factor": 3.0}, RopeConfig(kind="linear", factor=3.0)),
        ({"scaling.factor": 0.0}, RopeConfig()),
        ({"scaling.attn_factor": 1.19}, RopeConfig(attention_factor=1.19)),
        (YARN, RopeConfig(kind="yarn", factor=4.0, original_context=64, attention_factor=yarn_scale(4.0))),
        (
            {"scaling.type": "yarn", "scaling.yarn_ext_factor": 1.0, "scaling.yarn_log_multiplier": 0.0},
            RopeConfig(kind="yarn", original_context=512),
        ),
        (
            {**YARN, "scaling.yarn_beta_fast": 16.0, "scaling.yarn_beta_slow": 2.0, "scaling.attn_factor": 0.5},
            RopeConfig(
                kind="yarn",
                factor=4.0,
                original_context=64,
                beta_fast=16,
                beta_slow=2,
                attention_factor=0.5 * yarn_scale(4),
            ),
        ),
        (
            {**YARN, "scaling.yarn_attn_factor": float(np.float32(yarn_scale(4.0)))},
            RopeConfig(kind="yarn", factor=4.0, original_context=64, attention_factor=yarn_scale(4.0)),
        ),
    ],
)
def test_metadata(metadata: dict[str, Any], expected: RopeConfig) -> None:
    assert read(metadata) == expected


def test_what_the_family_alone_decides() -> None:
    assert read({}, theta=1e6) == RopeConfig(1e6)
    assert read({"dimension_count": 48}, partial=True) == RopeConfig(dim=48)
    assert not read(YARN, truncate=False).truncate
    deepseek = read({**YARN, "scaling.yarn_log_multiplier": 0.0707}, mscale_all_dim=0.707)
    assert deepseek.attention_factor == 1.0


@pytest.mark.parametrize(
    ("metadata", "shapes", "named"),
    [
        ({"scaling.type": "ntk"}, (), "scaling.type"),
        ({"scaling.type": "none", "scaling.factor": 2.0}, (), "scaling.factor"),
        ({"scaling.type": "longrope"}, (), "rope_factors_short"),
        ({"scaling.type": "longrope", "scaling.factor": 2.0}, FACTORS, "scaling.factor"),
        ({"scale_linear": 2.0}, FACTORS, "scale_linear"),
        ({"scaling.alpha": 1000.0}, (), "scaling.alpha"),
        ({"dimension_count": 48}, (), "dimension_count"),
        ({"freq_base": 0.0}, (), "freq_base"),
        ({"scaling.yarn_ext_factor": 1.0}, (), "yarn_ext_factor"),
        ({**YARN, "scaling.yarn_ext_factor": 0.5}, (), "yarn_ext_factor"),
        ({**YARN, "scaling.yarn_attn_factor": 1.0}, (), "yarn_attn_factor"),
        ({**YARN, "scaling.yarn_log_multiplier": 0.1}, (), "yarn_log_multiplier"),
    ],
)
def test_metadata_that_nobody_implemented_is_refused_by_name(metadata: Any, shapes: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(metadata, shapes)


def model(rope: RopeConfig) -> ModelConfig:
    return ModelConfig(family="llama", head_dim=HEAD, query_scale=1.0, rope=rope, **SIZES)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_divisors_of_llama3s_rule_are_llama3s_rope(factor: float) -> None:
    plain, rope = RopeConfig(5e5), RopeConfig(5e5, "llama3", factor, 1.0, 4.0, 8_192)
    divisors = rope_frequencies(plain, HEAD, 512) / rope_frequencies(rope, HEAD, 512)
    assert 1 < np.median(divisors) < factor
    assert with_rope_factors(model(plain), {ROPE_FREQS: divisors}).rope == rope


def test_divisors_of_no_known_rule_are_taken_as_they_are() -> None:
    divisors = np.linspace(0.5, 3, HEAD // 2, dtype=np.float32)
    got = with_rope_factors(MODEL, {ROPE_FREQS: divisors}).rope
    for context in (1, 2**20):
        ratio = rope_frequencies(MODEL.rope, HEAD, context) / rope_frequencies(got, HEAD, context)
        np.testing.assert_allclose(ratio, divisors, rtol=1e-6)


def test_the_two_tensors_of_longrope() -> None:
    metadata = {"scaling.type": "longrope", "scaling.original_context_length": 64, "scaling.attn_factor": 1.19}
    tensors = {LONG: np.full(24, 4, np.float32), SHORT: np.full(24, 2, np.float32)}
    rope = read({**metadata, "dimension_count": 48}, FACTORS, partial=True)
    expected = RopeConfig(
        kind="longrope",
        dim=48,
        original_context=64,
        attention_factor=1.19,
        short_factors=(2.0,) * 24,
        long_factors=(4.0,) * 24,
    )
    assert with_rope_factors(model(rope), tensors).rope == expected
    assert read({**metadata, "scaling.type": None, "dimension_count": 48}, FACTORS, partial=True) == rope


def test_a_file_without_such_tensors_is_left_as_it_is() -> None:
    assert with_rope_factors(MODEL, {}) is MODEL


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({ROPE_FREQS: np.ones(HEAD)}, "rope_freqs"),
        ({ROPE_FREQS: np.full(HEAD // 2, np.nan)}, "rope_freqs"),
        ({ROPE_FREQS: np.zeros(HEAD // 2)}, "rope_freqs"),
        ({SHORT: np.ones(HEAD // 2)}, "rope_factors_short"),
        ({SHORT: np.ones(HEAD // 2), LONG: np.ones(HEAD // 2 - 1)}, "rope_factors_long"),
        ({ROPE_FREQS: np.ones(HEAD // 2), SHORT: np.ones(HEAD // 2), LONG: np.ones(HEAD // 2)}, "rope_freqs"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tensors: dict[str, np.ndarray], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        with_rope_factors(MODEL, tensors)


def test_a_rope_is_not_stretched_twice() -> None:
    with pytest.raises(ConfigError, match="kind linear"):
        with_rope_factors(model(RopeConfig(kind="linear", factor=2.0)), {ROPE_FREQS: np.ones(HEAD // 2)})
