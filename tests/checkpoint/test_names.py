"""Every tensor of every family, in both formats: taken exactly once, and named where it is missing, surplus or turned.

Shapes alone are looked at; that the right tensor goes to the right place is what the logits show.
"""

import json
import shutil
from collections.abc import Mapping
from functools import cache
from math import prod
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint.fill import check_tensors, flatten
from jaxinfer.checkpoint.gguf import GGUFTensors
from jaxinfer.checkpoint.load import load
from jaxinfer.checkpoint.quantization import decoded
from jaxinfer.checkpoint.safetensors import SafetensorsDirectory
from jaxinfer.errors import CheckpointError
from jaxinfer.model.families import ROPE_TENSORS, Leaf, config_from_gguf, config_from_hf, family_of, leaf_of
from jaxinfer.model.transformer import abstract_params

from .goldens import GOLDEN, WITH_GGUF, proving

Shapes = Mapping[str, tuple[int, ...]]


@cache
def asked_for(path: Path) -> tuple[list[Leaf], Shapes]:
    """The leaves of the model at `path`, and the tensors it has."""
    if path.is_file():
        tensors = GGUFTensors(path)
        config = config_from_gguf(tensors.fields, tensors.shapes)
        naming = family_of(config.family).gguf.naming
        shapes = {name: shape for name, shape in tensors.shapes.items() if name not in ROPE_TENSORS}
    else:
        raw = json.loads((path / "config.json").read_text())
        config = config_from_hf(raw)
        naming = family_of(config.family).hf.naming
        shapes = decoded(SafetensorsDirectory(path), raw).tensors.shapes
    params = flatten(abstract_params(config, "float32"))
    return [leaf_of(config, naming, where, leaf.shape) for where, leaf in params.items()], shapes


CASES = [*proving("names"), *(pytest.param(f"{name}/model.gguf") for name in WITH_GGUF)]


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_is_taken_and_no_other(name: str):
    leaves, shapes = asked_for(GOLDEN / name)
    check_tensors(leaves, shapes)
    sources = {source.name for leaf in leaves for source in leaf.sources}
    assert sources == set(shapes)


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_that_is_missing_surplus_or_turned_is_named(name: str):
    leaves, shapes = asked_for(GOLDEN / name)
    for tensor, shape in shapes.items():
        with pytest.raises(CheckpointError, match=f"{tensor} is missing"):
            check_tensors(leaves, {other: size for other, size in shapes.items() if other != tensor})
        if shape != shape[::-1]:
            with pytest.raises(CheckpointError, match=f"{tensor} has shape"):
                check_tensors(leaves, {**shapes, tensor: shape[::-1]})
    with pytest.raises(CheckpointError, match=r"model\.extra\.weight of shape \(3,\) is surplus"):
        check_tensors(leaves, {**shapes, "model.extra.weight": (3,)})


@pytest.mark.parametrize("name", CASES)
def test_every_number_of_a_leaf_comes_from_one_place(name: str):
    """The parts of a leaf, joined, are the leaf; the cuts of a tensor follow each other without a gap or overlap."""
    leaves, _ = asked_for(GOLDEN / name)
    taken: dict[str, list[tuple[int, int]]] = {}
    for leaf in leaves:
        assert sum(prod(source.part) for source in leaf.sources) == prod(leaf.shape)
        for source in leaf.sources:
            whole = prod(source.shape)
            if source.cut is None:
                assert prod(source.part) == whole
                assert source.name not in taken
                taken[source.name] = [(0, 1)]
            else:
                taken.setdefault(source.name, []).append((source.cut.start, source.cut.stop))
                length = source.cut.view[source.cut.axis]
                assert prod(source.part) * length == whole * (source.cut.stop - source.cut.start)
    for spans in taken.values():
        assert all(stop == start for (_, stop), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False))


def with_tensors(source: Path, target: Path, extra: dict[str, np.ndarray]) -> Path:
    """A copy of a golden that holds other tensors too."""
    shutil.copytree(source, target)
    save_file({**load_file(source / "model.safetensors"), **extra}, target / "model.safetensors")
    return target


def test_a_layer_that_drafts_tokens_is_left_unread(tmp_path: Path):
    """As in DeepSeek V3's files: one layer more than `num_hidden_layers`, three here, and with tensors of its own."""
    row, square = np.ones(32, np.float32), np.ones((32, 64), np.float32)
    layer = {"eh_proj.weight": square, "enorm.weight": row, "self_attn.o_proj.weight": square}
    extra = {f"model.layers.3.{name}": value for name, value in layer.items()}
    golden = GOLDEN / "tiny_deepseek_v3"
    found = load(str(with_tensors(golden, tmp_path / "drafting", extra)), dtype="float32")
    expected = load(str(golden), dtype="float32")
    assert found.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    del extra["model.layers.3.eh_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.enorm\.weight of shape \(32,\) is surplus"):
        load(str(with_tensors(golden, tmp_path / "surplus", extra)), dtype="float32")


def test_frequencies_that_older_llamas_hold_are_left_unread(tmp_path: Path):
    extra = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32) for layer in (0, 1)}
    load(str(with_tensors(GOLDEN / "tiny_llama", tmp_path / "llama", extra)), dtype="float32")
    with pytest.raises(CheckpointError, match=r"rotary_emb\.inv_freq of shape \(6,\) is surplus"):
        load(str(with_tensors(GOLDEN / "tiny_qwen3", tmp_path / "qwen3", extra)), dtype="float32")
