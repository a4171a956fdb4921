"""Every tensor of every family, in both formats: taken exactly once, and named where it is missing, surplus or turned.

Shapes alone are looked at; that the right tensor goes to the right place is what the logits show.
"""

import json
from collections.abc import Mapping
from functools import cache
from math import prod
from pathlib import Path

import pytest

from jaxinfer.checkpoint.fill import check_tensors, flatten
from jaxinfer.checkpoint.gguf import GGUFTensors
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
