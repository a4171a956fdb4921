"""What a checkpoint says and nobody reads is told; what somebody reads is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.checkpoint.explain import GGUF_TOKENIZER, explain_config, stored_tensors
from jaxinfer.checkpoint.gguf import GGUFTensors
from jaxinfer.checkpoint.load import load, load_config, save_orbax
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.text.tokenizer import from_gguf

from . import makers

TINY = Path(__file__).parents[1] / "golden" / "tiny_llama"


def hf(tmp_path: Path, **changes: Any) -> Path:
    weights = {"model.safetensors": makers.hf_weights("llama")}
    return makers.write_hf(tmp_path / "hf", makers.hf_config("llama", **changes), weights)


def gguf(tmp_path: Path, **changes: Any) -> Path:
    tensors = makers.gguf_tensors("llama", makers.hf_weights("llama"))
    return makers.write_gguf(tmp_path / "model.gguf", "llama", tensors, makers.gguf_fields("llama", **changes))


def test_fields_of_config_json_that_nobody_reads_are_named(tmp_path: Path):
    path = str(hf(tmp_path, colour="blue", use_cache=True))
    explained = explain_config(path)
    assert explained.ignored == ("colour", "model_type", "use_cache")
    assert explained.config == load_config(path)


def test_a_field_that_changes_the_arithmetic_is_refused_and_not_ignored(tmp_path: Path):
    with pytest.raises(ConfigError, match="clip_qkv"):
        explain_config(str(hf(tmp_path, clip_qkv=8.0)))


def test_metadata_that_nobody_reads_is_named(tmp_path: Path):
    path = str(gguf(tmp_path, general__author="Ann", tokenizer__ggml__padding_token_id=0, tokenizer__chat_template="x"))
    explained = explain_config(path)
    assert {"general.author", "tokenizer.ggml.padding_token_id"} <= set(explained.ignored)
    assert not {name for name in explained.ignored if name.startswith("llama.")}
    assert "tokenizer.chat_template" not in explained.ignored
    assert explained.config == load_config(path)


class Watched(dict[str, Any]):
    """Metadata that remembers what was asked of it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


def test_the_tokenizer_reads_just_the_fields_that_are_called_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_path: Path, gemma_path: Path
):
    monkeypatch.setattr("jaxinfer.text.tokenizer.without_padding", lambda fields: fields)  # it makes a copy
    asked: set[str] = set()
    for path in (gguf(tmp_path), demo_path, gemma_path):
        watched = Watched(GGUFTensors(path).fields)
        from_gguf(watched)
        asked |= {name for name in watched.asked if name.startswith("tokenizer.")}
    assert asked == GGUF_TOKENIZER


def test_an_orbax_manifest_has_no_field_to_ignore_and_no_tensors_but_ours(tmp_path: Path):
    save_orbax(load(str(TINY), dtype="float32"), tmp_path / "orbax")
    explained = explain_config(str(tmp_path / "orbax"))
    assert explained == (load_config(str(TINY)), ())
    assert stored_tensors(tmp_path / "orbax") is None


@pytest.mark.parametrize("make", [hf, gguf])
def test_stored_tensors_are_those_of_the_file(tmp_path: Path, make: Any):
    path = make(tmp_path)
    stored = stored_tensors(path)
    assert stored is not None
    name = "lm_head.weight" if path.is_dir() else "output.weight"
    assert (stored.read(name) == makers.hf_weights("llama")["lm_head.weight"]).all()


def test_what_is_no_model_is_a_checkpoint_error(tmp_path: Path):
    with pytest.raises(CheckpointError):
        explain_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError):
        explain_config(str(tmp_path))
