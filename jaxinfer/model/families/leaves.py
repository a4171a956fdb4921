"""How the leaves of our parameter tree are made out of a checkpoint's tensors.

Knows: names, shapes, packing (q, k, v into one leaf; gate and up into one), llama.cpp's row permutation, norms that are
stored minus one. Knows no file format and reads nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.errors import ConfigError

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Naming:
    """What a family's tensors are called in one checkpoint format.

    names: our path, joined by `/` and with `block` for any `block_{i}`, to the checkpoint's names, where `{i}` is the
    layer. norm_offset is added to every norm weight. interleaved_rope: rows of q and k lie as (c/2, 2) inside a head
    instead of (2, c/2), as llama.cpp's converter writes them for architecture `llama`.
    """

    names: Mapping[str, tuple[str, ...]]
    norm_offset: float = 0.0
    interleaved_rope: bool = False


class Source(NamedTuple):
    """One tensor of the checkpoint: its name, the shape it must have there, and its shape inside our leaf."""

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of our tree: the sources, joined along `axis`, plus `offset`."""

    path: Path
    sources: tuple[Source, ...]
    axis: int = 0
    offset: float = 0.0

    def build(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """The leaf, from the tensors of its sources in order; a norm's offset is added in float32."""
        parts = [_place(source, tensor) for source, tensor in zip(self.sources, tensors, strict=True)]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self.axis)
        return joined.astype(np.float32) + np.float32(self.offset) if self.offset else joined


def leaf_of(config: ModelConfig, naming: Naming, path: Path, shape: tuple[int, ...]) -> Leaf:
    """Where the leaf at `path`, of `shape`, comes from. Raises ConfigError where the family has no such tensor."""
    role, layer = _role(path)
    if role not in naming.names:
        raise ConfigError(f"family {config.family} has no tensor for {'/'.join(path)}")
    names = [name.format(i=layer) for name in naming.names[role]]
    if role in ("block/attention/qkv", "block/attention/qkv_bias"):
        return Leaf(path, _qkv_sources(config, naming, names, shape), axis=1)
    if role == "block/mlp/gate_up":
        return Leaf(path, tuple(Source(name, shape[1:], (1, *shape[1:])) for name in names))
    if role == "block/attention/out":
        stored = (config.width, config.heads * config.head_dim)
        return Leaf(path, (Source(names[0], stored, shape),))
    offset = naming.norm_offset if path[-1].endswith("norm") else 0.0
    return Leaf(path, (Source(names[0], shape, shape),), offset=offset)


def _role(path: Path) -> tuple[str, int]:
    """The path with any `block_{i}` replaced by `block`, and i (0 outside blocks)."""
    head, _, number = path[0].partition("_")
    return ("/".join(("block", *path[1:])), int(number)) if head == "block" else ("/".join(path), 0)


def _qkv_sources(config: ModelConfig, naming: Naming, names: list[str], shape: tuple[int, ...]) -> tuple[Source, ...]:
    """Per kv head: its g query heads, then its key, then its value; `shape` is [k, g+2, c] or [k, g+2, c, w]."""
    k, c, rest = config.kv_heads, config.head_dim, shape[3:]
    heads = (config.group, 1, 1)
    turned = (naming.interleaved_rope, naming.interleaved_rope, False)
    return tuple(
        Source(name, (k * n * c, *rest), (k, n, c, *rest), interleaved)
        for name, n, interleaved in zip(names, heads, turned, strict=True)
    )


def _place(source: Source, tensor: np.ndarray) -> np.ndarray:
    if not source.interleaved:
        return tensor.reshape(source.view)
    k, n, c, *rest = source.view
    return tensor.reshape(k, n, c // 2, 2, *rest).swapaxes(2, 3).reshape(source.view)
