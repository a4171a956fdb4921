"""`config.json` as the models' makers published them (tests/data/published_configs.json): each loads, as what it is.

The fields were written down from memory of the hub's files; what never changes anything (versions, dropout) is left
out.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.config import ModelConfig
from jaxinfer.model.families import config_from_hf
from jaxinfer.roofline import total_weights

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_configs.json").read_text())
FIVE_OF_SIX = (*(512,) * 5, None)

EXPECTED: dict[str, dict[str, Any]] = {
    "llama2": {"family": "llama", "context": 4096, "norm_eps": 1e-5},
    "llama31": {"kv_heads": 8, "context": 131_072, "tied_head": False},
    "llama32": {"head_dim": 64, "tied_head": True},
    "llama1 old": {"kv_heads": 32},
    "deepseek-coder-6.7b": {"context": 16_384},
    "yarn-llama-2-128k": {"context": 131_072},
    "mistral v0.1": {"family": "mistral", "windows": (4096,) * 32},
    "mistral v0.3": {"windows": ()},
    "nemo": {"head_dim": 128, "context": 1_024_000},
    "ministral8b": {"windows": (32_768,) * 32},
    "mixtral": {"family": "mixtral", "windows": ()},
    "qwen2.5": {"family": "qwen2", "attention_bias": True, "output_bias": False, "windows": ()},
    "qwen2.5 yarn": {"context": 131_072},
    "qwen1.5": {"attention_bias": True},
    "qwq": {"layers": 64, "windows": ()},
    "qwen3": {"family": "qwen3", "qk_norm": "head", "attention_bias": False},
    "qwen3 yarn": {"context": 131_072},
    "qwen3moe": {"family": "qwen3_moe", "dense_layers": ()},
    "qwen3-coder": {"qk_norm": "head", "context": 262_144},
    "gemma": {"family": "gemma", "activation": "gelu_tanh", "kv_heads": 1, "tied_head": True},
    "gemma gelu": {"activation": "gelu_tanh"},
    "gemma2": {"family": "gemma2", "windows": (4096, None) * 13, "attention_softcap": 50.0, "logit_softcap": 30.0},
    "gemma2-27b": {"query_scale": 144**-0.5},
    "gemma3-1b": {"family": "gemma3", "windows": (*FIVE_OF_SIX * 4, 512, 512), "logit_softcap": None},
    "gemma3-270m": {"windows": (*FIVE_OF_SIX * 4, 512, 512)},
    "gemma3-1b, saved by transformers 5": {"windows": (*FIVE_OF_SIX * 4, 512, 512)},
    "medgemma27b": {"query_scale": 168**-0.5},
    "phi3-4k": {"family": "phi3", "windows": (2047,) * 32, "head_dim": 96},
    "phi3-128k": {"context": 131_072},
    "phi3-128k su": {"context": 131_072},
    "phi4": {"windows": (), "context": 16_384},
    "phi4-mini": {"tied_head": True},
    "phi4-mini, saved by transformers 5": {"tied_head": True},
    "olmo2": {"family": "olmo2", "pre_norms": False, "post_norms": True, "qk_norm": "all"},
    "smollm2": {"family": "llama", "tied_head": True},
    "smollm3": {"family": "smollm3", "no_rope": tuple(range(3, 36, 4)), "tied_head": True},
    "granite3": {"family": "granite", "query_scale": 0.015625, "residual_scale": 0.22, "logit_scale": 0.125},
    "gpt-oss": {"family": "gpt_oss", "sinks": True, "windows": (128, None) * 12, "activation": "swiglu_clamped"},
    "dsv3": {"family": "deepseek_v3", "dense_layers": (0, 1, 2), "context": 163_840},
    "v3.1 ue8m0": {"family": "deepseek_v3"},
    "kimi-k2": {"dense_layers": (0,)},
    "moonlight": {"heads": 16},
    "dsv3 t5": {"family": "deepseek_v3"},
}
ROPES = {
    "llama31": ("llama3", None),
    "deepseek-coder-6.7b": ("linear", None),
    "yarn-llama-2-128k": ("yarn", None),
    "qwen2.5 yarn": ("yarn", None),
    "medgemma27b": ("linear", None),
    "phi3-128k su": ("longrope", None),
    "phi4-mini": ("longrope", 96),
    "phi4-mini, saved by transformers 5": ("longrope", 96),
    "gpt-oss": ("yarn", None),
    "dsv3": ("yarn", None),
    "moonlight": ("default", None),
}
"""Kind, and how many features of a head turn."""


def read(name: str) -> ModelConfig:
    return config_from_hf(PUBLISHED[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_read_as_what_it_is(name: str):
    config = read(name)
    assert {field: getattr(config, field) for field in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", ROPES)
def test_its_rope(name: str):
    rope = read(name).rope
    assert (rope.kind, rope.dim) == ROPES[name]


def test_written_anew_it_is_the_same_model():
    assert read("gemma3-1b, saved by transformers 5") == read("gemma3-1b") == read("gemma3-270m")
    assert read("phi4-mini, saved by transformers 5") == read("phi4-mini")
    assert read("dsv3 t5") == read("dsv3") == read("v3.1 ue8m0")


def test_deepseek_v3_has_the_weights_of_its_card():
    assert round(total_weights(read("dsv3")) / 1e9) == 671
