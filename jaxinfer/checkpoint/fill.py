"""Fills the parameter tree from a checkpoint's tensors, every leaf exactly once.

Knows: which tensors the tree asks for, and that anything missing, surplus or misshapen is an error. Knows no file
format.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Shaped

from jaxinfer.checkpoint.quantise import quantise
from jaxinfer.checkpoint.stored import StoredTensors, build_stored, stored_struct
from jaxinfer.checkpoint.tensors import Tensors, empty, read_as
from jaxinfer.config import ModelConfig, QuantizeName
from jaxinfer.errors import CheckpointError
from jaxinfer.model.families import Leaf, Naming, leaf_of, unread_tensors
from jaxinfer.model.quantised import Quantised, is_quantised, quantisable, spread
from jaxinfer.model.transformer import abstract_params

Shardings = Callable[[ModelConfig], Any]
"""Given the configuration, a tree like the parameters' with a `jax.sharding.Sharding` per leaf."""
Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total)."""
STAGE = "load weights"


def fill(
    tensors: Tensors,
    config: ModelConfig,
    naming: Naming,
    dtype: str,
    *,
    quantize: QuantizeName | None = None,
    unused: Sequence[str] = (),
    shardings: Shardings | None = None,
    progress: Progress | None = None,
) -> Any:
    """The parameters as a nested dict of JAX arrays, on the default device or as `shardings` says.

    One leaf at a time is read in its dtype (`dtype`; norms float32) and placed, the largest first: the host holds one
    leaf more than the devices do, and that at a time when little is loaded. `unused` names tensors that may be there
    and are not read, beside those that the family leaves unread. `quantize` makes leaves of type Quantised where it
    may; "stored" needs tensors that are `StoredTensors`. Raises CheckpointError before anything is read where names or
    shapes are not those that `config` asks for.
    """
    check_layers(config, len(tensors.shapes))
    _check_experts(config, naming, len(tensors.shapes))
    flat = flatten(abstract_params(config, dtype))
    leaves = [leaf_of(config, naming, path, leaf.shape) for path, leaf in flat.items()]
    ignored = {*unused, *unread_tensors(config, naming, tensors.shapes)}
    check_tensors(leaves, {name: shape for name, shape in tensors.shapes.items() if name not in ignored})
    places = flatten(shardings(config)) if shardings else {}
    filled = dict.fromkeys(flat)  # in the tree's order
    for done, leaf in enumerate(sorted(leaves, key=lambda leaf: flat[leaf.path].size, reverse=True)):
        if progress:
            progress(STAGE, done, len(leaves))
        value = _value(tensors, leaf, flat[leaf.path].dtype, quantize)
        # Waits, since a copy that is still going would hold the host's array while the next is made.
        filled[leaf.path] = jax.block_until_ready(jax.device_put(value, spread(value, places.get(leaf.path))))
        del value
    if progress:
        progress(STAGE, len(leaves), len(leaves))
    return unflatten(filled)


def structs(tensors: Tensors, config: ModelConfig, naming: Naming, dtype: str, quantize: QuantizeName | None) -> Any:
    """The parameter tree that `fill` makes, as shapes and dtypes; no weight is read."""
    if quantize != "stored":
        return abstract_params(config, dtype, quantize)
    flat = flatten(abstract_params(config, dtype))
    for path, struct in flat.items():
        if quantisable(path):
            leaf = leaf_of(config, naming, path, struct.shape)
            flat[path] = stored_struct(cast(StoredTensors, tensors), leaf, struct.dtype) or struct
    return unflatten(flat)


def _value(
    tensors: Tensors, leaf: Leaf, dtype: np.dtype, quantize: QuantizeName | None
) -> Quantised | Shaped[np.ndarray, "..."]:
    """The leaf in host memory, plain or quantised."""
    if quantize is None or not quantisable(leaf.path):
        return build(tensors, leaf, dtype)
    if quantize == "stored":
        stored = build_stored(cast(StoredTensors, tensors), leaf, dtype)
        return build(tensors, leaf, dtype) if stored is None else stored
    return quantise(leaf.path, build(tensors, leaf, dtype), quantize)


def build(tensors: Tensors, leaf: Leaf, dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """The leaf in host memory, in `dtype`; a norm's offset is added in float32. One tensor at a time is beside it."""
    if len(leaf.sources) == 1:
        whole = leaf.sources[0].place(read_as(tensors, leaf.sources[0].name, dtype))
    else:
        whole = _join(tensors, leaf, dtype)
    whole = whole.reshape(leaf.shape)
    return whole.astype(np.float32) + np.float32(leaf.offset) if leaf.offset else whole


def _join(tensors: Tensors, leaf: Leaf, dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """The parts of the leaf, one behind the other. A tensor that several parts come from is read once."""
    joined = list(leaf.sources[0].part)
    joined[leaf.axis] = sum(source.part[leaf.axis] for source in leaf.sources)
    whole, start = empty(tuple(joined), dtype), 0
    for name, sources in groupby(leaf.sources, key=lambda source: source.name):
        tensor = read_as(tensors, name, dtype)
        for source in sources:
            stop = start + source.part[leaf.axis]
            whole[(slice(None),) * leaf.axis + (slice(start, stop),)] = source.place(tensor)
            start = stop
    return whole


def check_layers(config: ModelConfig, tensors: int) -> None:
    """A hostile layer count is refused before a tree of that size is traced."""
    if config.layers > tensors:
        raise CheckpointError(f"configuration has {config.layers} layers, but the checkpoint has {tensors} tensors")


def _check_experts(config: ModelConfig, naming: Naming, tensors: int) -> None:
    """As for layers, where each expert has tensors of its own: their names alone could fill the memory."""
    if config.experts is None or not any("{e}" in name for names in naming.names.values() for name in names):
        return
    layers, count = config.layers - len(config.dense_layers), config.experts.count
    if layers * count > tensors:
        raise CheckpointError(
            f"configuration has {count} experts on {layers} layers, but the checkpoint has {tensors} tensors"
        )


def check_tensors(leaves: Sequence[Leaf], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The checkpoint holds exactly the tensors that the leaves ask for, each of the right shape."""
    expected = {source.name: source.shape for leaf in leaves for source in leaf.sources}
    problems = [f"{name} is missing; expected shape {expected[name]}" for name in expected if name not in shapes]
    problems += [f"{name} of shape {shapes[name]} is surplus" for name in shapes if name not in expected]
    problems += [
        f"{name} has shape {shapes[name]}; expected {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(f"tensors do not fit the configuration: {'; '.join(problems[:3])}{more}")


def flatten(tree: Any) -> dict[tuple[str, ...], Any]:
    """The leaves of a nested dict by path, in the tree's own order."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantised)
    return {tuple(str(key.key) for key in path): leaf for path, leaf in paths}


def unflatten(leaves: Mapping[tuple[str, ...], Any]) -> Any:
    """The nested dict whose leaves are `leaves`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree
