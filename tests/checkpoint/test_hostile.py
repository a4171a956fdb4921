"""Hostile checkpoints through the public loader: a model or one of its errors, and no more memory than a few files."""

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoint.gguf_header import read_header
from jaxinfer.checkpoint.load import load
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.model.families import config_from_gguf, config_from_hf

from .hostile import JUNK, damaged_bytes, damaged_json, load_or_refuse, replaced, routes
from .makers import gguf_fields, gguf_tensors, hf_config, hf_weights, write_gguf, write_hf

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
JSON_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model.safetensors.index.json",
)


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What a process pays once, for its first model, is no damaged file's doing."""
    for name in ("tiny_deepseek_v3", "tiny_gpt_oss", "tiny_deepseek_v3/model.gguf"):
        load(str(GOLDEN / name), dtype="float32")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of two shards, with every small file that a loader reads."""
    weights = list(hf_weights("llama").items())
    shards = {f"model-{i}.safetensors": dict(weights[i::2]) for i in range(2)}
    path = write_hf(tmp_path_factory.mktemp("hostile") / "hf", hf_config("llama"), shards)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "temperature": 0.5, "top_k": 20}))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "chat_template": "{{ a }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """A GGUF file, its bytes, and where its tensors begin."""
    path = tmp_path_factory.mktemp("hostile") / "m.gguf"
    write_gguf(path, "llama", gguf_tensors("llama", hf_weights("llama")), gguf_fields("llama"))
    return path, path.read_bytes(), min(tensor.start for tensor in read_header(path).tensors.values())


# ---- GGUF ------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(data=st.data())
def test_a_damaged_gguf_file(whole: tuple[Path, bytes, int], data: st.DataObject):
    """Metadata, tokens and the table of tensors: whatever is done to them."""
    path, raw, end = whole
    path.write_bytes(data.draw(damaged_bytes(raw, end)))
    load_or_refuse(path)


@settings(max_examples=25)
@given(data=st.data())
def test_a_damaged_table_of_gguf_tensors(whole: tuple[Path, bytes, int], data: st.DataObject):
    path, raw, end = whole
    start = raw.rindex(b"tokenizer.ggml.eos_token_id", 0, end)
    path.write_bytes(raw[:start] + data.draw(damaged_bytes(raw[start:], end - start)))
    load_or_refuse(path)


@settings(max_examples=25)
@given(data=st.data())
def test_gguf_metadata_of_another_kind(whole: tuple[Path, bytes, int], data: st.DataObject):
    """Sound as a container, absurd in what it says."""
    path, _, _ = whole
    fields = gguf_fields("llama")
    name = data.draw(st.sampled_from(sorted(fields)))
    numbers = st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 0.0, -1.0, 1e38, float("nan"), float("inf")])
    lists = st.sampled_from([["x"], [1, 2], [0.5], [-1]])
    changes = {name: data.draw(numbers | st.text(max_size=8) | st.booleans() | lists)}
    write_gguf(path, "llama", gguf_tensors("llama", hf_weights("llama")), {**fields, **changes})
    load_or_refuse(path)


# ---- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JSON_FILES)
@settings(max_examples=25)
@given(data=st.data())
def test_values_of_other_types(directory: Path, name: str, data: st.DataObject):
    path = directory / name
    sound = path.read_text()
    try:
        path.write_text(data.draw(damaged_json(sound)))
        load_or_refuse(directory)
    finally:
        path.write_text(sound)


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("text", ["", "[" * 100_000, "NaN", '{"a": 1', '"\ud800"', "1" * 5000, "\0" * 50])
def test_files_that_are_no_objects(directory: Path, name: str, text: str):
    path = directory / name
    sound = path.read_text()
    try:
        path.write_text(text, errors="surrogatepass")
        load_or_refuse(directory)
    finally:
        path.write_text(sound)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_every_family_in_turn(family: str):
    """Each of them alone, each junk: a ConfigError, or a configuration (whose shapes the weights must then have)."""
    sound = json.loads((GOLDEN / family / "config.json").read_text())
    for route in routes(sound):
        for junk in JUNK:
            value = replaced(sound, route, junk)
            with contextlib.suppress(ConfigError):
                config_from_hf(value if isinstance(value, dict) else {})


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/model.gguf")), ids=lambda path: path.parent.name)
def test_every_number_of_every_gguf_file_in_turn(path: Path):
    header = read_header(path)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    for name in [name for name in header.fields if not name.startswith("tokenizer.")]:
        for junk in (*JUNK, 2**64 - 1, float("nan"), float("inf")):
            with contextlib.suppress(ConfigError):
                config_from_gguf({**header.fields, name: junk}, shapes)


def test_more_experts_than_tensors(tmp_path: Path):
    """Each would be asked for by name."""
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(GOLDEN / "tiny_qwen3_moe" / name)
    sound = json.loads((GOLDEN / "tiny_qwen3_moe" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**sound, "num_experts": None, "num_local_experts": 2**31 - 1}))
    with pytest.raises(CheckpointError, match="2147483647 experts"):
        load(str(tmp_path), dtype="float32")


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=4)
@given(data=st.data())
def test_a_configuration_that_its_weights_do_not_have(
    tmp_path_factory: pytest.TempPathFactory, family: str, data: st.DataObject
):
    """A whole number of each family's configuration is another one, so that sizes are tried which nothing bounds."""
    sound = json.loads((GOLDEN / family / "config.json").read_text())
    directory = tmp_path_factory.getbasetemp() / family
    if not directory.exists():
        directory.mkdir()
        for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (directory / name).symlink_to(GOLDEN / family / name)
    numbers = [name for name, value in sound.items() if isinstance(value, int) and not isinstance(value, bool)]
    name = data.draw(st.sampled_from(numbers))
    value = data.draw(st.sampled_from([1, 2, 3, 7, 64, 4096, 2**16, 2**20, 2**31 - 1]))
    (directory / "config.json").write_text(json.dumps({**sound, name: value}))
    load_or_refuse(directory)


# ---- safetensors -----------------------------------------------------------------------------------------------------


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def with_header(header: str, data: bytes) -> bytes:
    return struct.pack("<Q", len(header.encode())) + header.encode() + data


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A directory of one file, and that file's bytes."""
    directory = tmp_path_factory.mktemp("hostile") / "single"
    write_hf(directory, hf_config("llama"), {"model.safetensors": hf_weights("llama")})
    return directory, (directory / "model.safetensors").read_bytes()


@settings(max_examples=40)
@given(data=st.data())
def test_a_damaged_safetensors_file(single: tuple[Path, bytes], data: st.DataObject):
    directory, raw = single
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    (directory / "model.safetensors").write_bytes(data.draw(damaged_bytes(raw, end)))
    load_or_refuse(directory)


@settings(max_examples=25)
@given(data=st.data())
def test_a_safetensors_header_of_other_values(single: tuple[Path, bytes], data: st.DataObject):
    directory, raw = single
    path = directory / "model.safetensors"
    path.write_bytes(raw)
    header, numbers = header_of(path)
    path.write_bytes(with_header(data.draw(damaged_json(json.dumps(header))), numbers))
    load_or_refuse(directory)


Edit = Callable[[dict[str, Any]], str]


def changed(**entry: Any) -> Edit:
    """One tensor's entry with other values."""
    name = "model.layers.0.mlp.up_proj.weight"
    return lambda header: json.dumps({**header, name: {**header[name], **entry}})


def doubled(header: dict[str, Any]) -> str:
    """One name twice, with two shapes."""
    entry = json.dumps({**header["model.norm.weight"], "shape": [1, 32]})
    return json.dumps(header)[:-1] + f', "model.norm.weight": {entry}}}'


@pytest.mark.parametrize(
    "edit",
    [
        changed(dtype="F64"),
        changed(dtype="f32"),
        changed(dtype="F4"),
        changed(dtype="I8"),
        changed(shape=[32, 31]),
        changed(shape=[2**32, 2**32]),
        changed(shape=[2**63, 0]),
        changed(shape=[0, 2**31]),
        changed(shape=[32, 32] + [1] * 100),
        changed(data_offsets=[0, 4096]),
        changed(data_offsets=[2**63, 2**63 + 4096]),
        changed(data_offsets=[4096, 0]),
        doubled,
        lambda header: json.dumps({**header, "__metadata__": {"a": 1}}),
        lambda header: json.dumps({**header, "x" * 100_000: header["model.norm.weight"]}),
        lambda header: json.dumps(header) + " " * 99 + "{}",
    ],
)
def test_a_safetensors_header_that_lies(single: tuple[Path, bytes], edit: Edit):
    directory, raw = single
    path = directory / "model.safetensors"
    path.write_bytes(raw)
    header, numbers = header_of(path)
    path.write_bytes(with_header(edit(header), numbers))
    load_or_refuse(directory)
    with pytest.raises(CheckpointError):
        load(str(directory), dtype="float32")


def test_a_file_that_shrinks_after_its_header_was_checked(single: tuple[Path, bytes]):
    from jaxinfer.checkpoint.safetensors import SafetensorsDirectory

    directory, raw = single
    path = directory / "model.safetensors"
    path.write_bytes(raw)
    tensors = SafetensorsDirectory(directory)
    path.write_bytes(raw[:-4])
    last = max(tensors.shapes, key=lambda name: header_of(path)[0][name]["data_offsets"][1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has become shorter"):
        tensors.read(last)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        tensors.read(last)
    path.write_bytes(raw)
    assert np.isfinite(tensors.read(last)).all()
