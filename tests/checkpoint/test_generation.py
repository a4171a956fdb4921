"""What a checkpoint recommends to sample with: read, checked, kept by conversion, and never applied unasked."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.checkpoint.files import chat_template
from jaxinfer.checkpoint.generation import FIELDS, checked_sampling, gguf_generation, read_generation
from jaxinfer.errors import CheckpointError
from jaxinfer.request import SamplingParams

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def written(folder: Path, generation: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_no_file_recommends_nothing(tmp_path: Path):
    found = read_generation(tmp_path)
    assert (found.eos_ids, found.sampling, found.ignored) == (frozenset(), {}, ())


def test_a_published_file(tmp_path: Path):
    found = read_generation(written(tmp_path, QWEN3))
    assert found.eos_ids == {151643, 151645}
    assert found.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert found.ignored == ()


def test_lengths_caches_and_nulls_recommend_nothing(tmp_path: Path):
    raw = {
        "eos_token_id": 2,
        "max_length": 4096,
        "max_new_tokens": 512,
        "use_cache": True,
        "top_k": None,
        "num_beams": 1,
    }
    found = read_generation(written(tmp_path, raw))
    assert (found.eos_ids, found.sampling, found.ignored) == ({2}, {}, ())


def test_greedy_by_the_file_is_temperature_0(tmp_path: Path):
    raw = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    assert read_generation(written(tmp_path, raw)).sampling == {"temperature": 0.0, "repetition_penalty": 1.1}


def test_fields_that_ask_for_more_are_named(tmp_path: Path):
    raw = {
        "typical_p": 0.9,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [1],
        "epsilon_cutoff": 0.0,
        "bad_words_ids": None,
    }
    assert read_generation(written(tmp_path, raw)).ignored == ("no_repeat_ngram_size", "suppress_tokens", "typical_p")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", -1), ("temperature", "0.6"), ("temperature", 1e9), ("temperature", True)],
        *[("top_k", -1), ("top_k", 2.5), ("top_p", 0), ("top_p", 1.5), ("min_p", 2), ("repetition_penalty", 0)],
    ],
)
def test_a_value_out_of_range_is_ignored_and_told(tmp_path: Path, field: str, value: Any):
    found = read_generation(written(tmp_path, {field: value, "min_p" if field != "min_p" else "top_p": 0.5}))
    assert (len(found.sampling), found.ignored) == (1, (field,))
    key = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}.get(field, field)
    found = gguf_generation({f"general.sampling.{key}": value})
    assert (found.sampling, found.ignored) == ({}, (f"general.sampling.{key}",))
    with pytest.raises(CheckpointError, match=rf"jaxinfer\.json: {field} is"):
        checked_sampling({field: value}, "jaxinfer.json")


def test_a_whole_number_may_have_a_point(tmp_path: Path):
    assert read_generation(written(tmp_path, {"top_k": 50.0})).sampling == {"top_k": 50}


def test_a_gguf_file_recommends_too():
    fields = {"general.sampling.temp": 0.7, "general.sampling.top_k": 64, "general.sampling.xtc_threshold": 0.1}
    assert gguf_generation(fields).sampling == {"temperature": 0.7, "top_k": 64}


@pytest.mark.parametrize("values", [None, [], "x", {"seed": 1}, {"max_tokens": 5}])
def test_only_what_shapes_the_distribution_is_kept(values: Any):
    with pytest.raises(CheckpointError, match="expected some of"):
        checked_sampling(values, "here")


def test_every_recommended_field_is_a_sampling_field():
    assert set(FIELDS) <= set(SamplingParams.__dataclass_fields__)


# ---- chat templates --------------------------------------------------------------------------------------------------


def test_the_template_of_a_file_comes_before_that_of_the_configuration(tmp_path: Path):
    assert chat_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "C"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert chat_template(tmp_path) == "C"
    (tmp_path / "chat_templates").mkdir()
    (tmp_path / "chat_templates" / "rag.jinja").write_text("R")
    assert chat_template(tmp_path) == "C"
    (tmp_path / "chat_templates" / "default.jinja").write_text("D")
    assert chat_template(tmp_path) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert chat_template(tmp_path) == "F"


@pytest.mark.parametrize("template", [7, {"default": "x"}, [{"name": "default", "template": 7}]])
def test_a_template_that_is_no_text(tmp_path: Path, template: Any):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(CheckpointError, match="chat_template"):
        chat_template(tmp_path)
