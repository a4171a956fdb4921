"""How the leaves of our parameter tree are made out of a checkpoint's tensors.

Knows: names, shapes, packing (q, k, v into one leaf; gate and up into one; experts into one), orders of rows that
others chose, norms that are stored minus one. Knows no file format and reads nothing.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from jaxinfer.config import LatentConfig, ModelConfig
from jaxinfer.errors import ConfigError

Path = tuple[str, ...]
Shape = tuple[int, ...]


class Cut(NamedTuple):
    """Entries `start` to `stop` of an axis, once the tensor is reshaped to `view`."""

    view: Shape
    axis: int
    start: int
    stop: int


class Source(NamedTuple):
    """One tensor of the checkpoint, and how its numbers become a part of our leaf.

    The tensor `name` must have `shape`. What `cut` leaves of it is reshaped to `split`, its axes are put into `order`,
    and the result is reshaped to `part`; None skips a step.
    """

    name: str
    shape: Shape
    part: Shape
    cut: Cut | None = None
    split: Shape | None = None
    order: tuple[int, ...] | None = None

    def place(self, tensor: np.ndarray) -> np.ndarray:
        """The part that `tensor` is."""
        if self.cut is not None:
            view, axis, start, stop = self.cut
            tensor = tensor.reshape(view)[(slice(None),) * axis + (slice(start, stop),)]
        tensor = tensor if self.split is None else tensor.reshape(self.split)
        return (tensor if self.order is None else tensor.transpose(self.order)).reshape(self.part)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of our tree: the parts of its sources, joined along `axis`, as an array of `shape`; norms plus `offset`.

    One tensor may be the source of several parts.
    """

    path: Path
    shape: Shape
    sources: tuple[Source, ...]
    axis: int = 0
    offset: float = 0.0


class Want(NamedTuple):
    """A leaf that the tree asks for: whose, where, how large, and what the checkpoint calls its tensors."""

    config: ModelConfig
    path: Path
    shape: Shape
    names: tuple[str, ...]


Layout = Callable[[Want], Leaf]
"""Turns what is wanted into where it comes from."""


@dataclass(frozen=True, slots=True)
class Naming:
    """What a family's tensors are called in one checkpoint format, and how they are laid out.

    names: our path, joined by `/` and with `block` for any `block_{i}`, to the checkpoint's names, where `{i}` is the
    layer and `{e}` an expert. layouts: our paths, as in names, that are laid out in another way than `usual_layout`
    takes for granted. norm_offset is added to every norm weight. drafting: the name, with `{i}`, of a tensor that only
    a layer has which drafts tokens ahead; such layers lie behind the decoder's own, and none of them is read. unused:
    other names that may be there and are not read.
    """

    names: Mapping[str, tuple[str, ...]]
    layouts: Mapping[str, Layout] | None = None
    norm_offset: float = 0.0
    drafting: str | None = None
    unused: tuple[str, ...] = ()


def unread_tensors(config: ModelConfig, naming: Naming, names: Collection[str]) -> set[str]:
    """Those of `names` that a checkpoint of this family may hold although `config` asks for none of them."""
    layers = "|".join(re.escape(name).replace(r"\{i\}", r"\d+") for name in naming.unused)
    unread = {name for name in names if layers and re.fullmatch(layers, name)}
    if naming.drafting is None:
        return unread
    marker = re.escape(naming.drafting).replace(r"\{i\}", r"(\d{1,9})")
    drafting = [int(found[1]) for found in map(re.compile(marker).fullmatch, names) if found]
    start = naming.drafting.partition("{i}")[0]
    prefixes = tuple(f"{start}{layer}." for layer in drafting if layer >= config.layers)
    return unread | {name for name in names if name.startswith(prefixes)}


def leaf_of(config: ModelConfig, naming: Naming, path: Path, shape: Shape) -> Leaf:
    """Where the leaf at `path`, of `shape`, comes from. Raises ConfigError where the family has no such tensor."""
    role, layer = _role(path)
    if role not in naming.names:
        raise ConfigError(f"family {config.family} has no tensor for {'/'.join(path)}")
    names = tuple(name.replace("{i}", str(layer)) for name in naming.names[role])
    layout = (naming.layouts or {}).get(role, usual_layout)
    leaf = layout(Want(config, path, shape, names))
    if not naming.norm_offset or not path[-1].endswith("norm"):
        return leaf
    return Leaf(leaf.path, leaf.shape, leaf.sources, leaf.axis, naming.norm_offset)


def _role(path: Path) -> tuple[str, int]:
    """The path with any `block_{i}` replaced by `block`, and i (0 outside blocks)."""
    found = re.fullmatch(r"block_(\d+)", path[0])
    return ("/".join(("block", *path[1:])), int(found[1])) if found else ("/".join(path), 0)


def usual_layout(want: Want) -> Leaf:
    """The layout that most families share: linear layers output-first, experts one by one or already stacked.

    Several names are joined: q, k and v by kv head; gate and up one behind the other.
    """
    if want.path[-1] in ("qkv", "qkv_bias"):
        return heads_apart(want)
    if "{e}" in want.names[0]:
        return experts_apart(want)
    if want.path[-1] in ("gate_up", "gate_up_bias"):
        return gate_beside_up(want)
    return as_stored(want)


def as_stored(want: Want) -> Leaf:
    """One tensor of the leaf's own numbers in the leaf's own order; heads are rows (or columns) without an axis."""
    return Leaf(want.path, want.shape, (Source(want.names[0], _stored(want), want.shape),))


def _stored(want: Want) -> Shape:
    """The shape of a linear layer in which ours has an axis of heads or of experts' shared halves."""
    config, shape, kind = want.config, want.shape, want.path[-1]
    if kind == "out":
        return (config.width, prod(shape[1:]))
    if kind in ("query", "q_up"):
        return (shape[0] * shape[1], shape[2])
    if kind in ("q_norm", "k_norm", "sinks"):
        return (prod(shape),)
    return shape


def heads_apart(want: Want, *, interleaved: bool = False) -> Leaf:
    """q, k and v as three tensors: per kv head its g query heads, then its key, then its value.

    interleaved: rows of q and k lie as (c/2, 2) inside a head instead of (2, c/2), as llama.cpp's converter writes them
    for architecture `llama`.
    """
    config, rest = want.config, want.shape[3:]
    k, c = config.kv_heads, config.head_dim
    sources = []
    for name, n, turned in zip(want.names, (config.group, 1, 1), (interleaved, interleaved, False), strict=True):
        part = (k, n, c, *rest)
        split, order = _pairs_to_halves(part, axis=2) if turned else (None, None)
        sources.append(Source(name, (k * n * c, *rest), part, split=split, order=order))
    return Leaf(want.path, want.shape, tuple(sources), axis=1)


def _pairs_to_halves(shape: Shape, axis: int) -> tuple[Shape, tuple[int, ...]]:
    """The split and the order that bring entries (2i, 2i + 1) of an axis to (i, i + half)."""
    split = (*shape[:axis], shape[axis] // 2, 2, *shape[axis + 1 :])
    order = list(range(len(split)))
    order[axis], order[axis + 1] = axis + 1, axis
    return split, tuple(order)


def heads_together(want: Want) -> Leaf:
    """q, k and v as one tensor: all query heads, all keys, all values (phi3)."""
    config, rest = want.config, want.shape[3:]
    k, c, (name,) = config.kv_heads, config.head_dim, want.names
    stored, sources, start = (k * (config.group + 2) * c, *rest), [], 0
    for n in (config.group, 1, 1):
        sources.append(Source(name, stored, (k, n, c, *rest), Cut(stored, 0, start, start + k * n * c)))
        start += k * n * c
    return Leaf(want.path, want.shape, tuple(sources), axis=1)


def gate_beside_up(want: Want) -> Leaf:
    """gate and up as two tensors, [f, w] each (experts stacked: [e, f, w]; biases without w), or as one [2f, w]."""
    halves = want.path[-2] == "experts"
    axis = 1 if halves else 0
    shape = want.shape[:axis] + want.shape[axis + 1 :]
    if len(want.names) == 1:
        joined = (*want.shape[:axis], 2 * want.shape[axis + 1], *want.shape[axis + 2 :])
        return Leaf(want.path, want.shape, (Source(want.names[0], joined, want.shape),))
    part = (*want.shape[:axis], 1, *want.shape[axis + 1 :])
    return Leaf(want.path, want.shape, tuple(Source(name, shape, part) for name in want.names), axis=axis)


def experts_apart(want: Want) -> Leaf:
    """Each expert's matrices as tensors of their own, whose names hold `{e}`; gate and up are two names."""
    count, matrix = want.shape[0], want.shape[-2:]
    names = [name.replace("{e}", str(e)) for e in range(count) for name in want.names]
    return Leaf(want.path, want.shape, tuple(Source(name, matrix, (1, *matrix)) for name in names))


def rope_rows_paired(want: Want) -> Leaf:
    """The last rope_dim rows of each head (query, q_up) or of the whole (kv_down) lie in pairs, as (rope_dim/2, 2)."""
    heads, (rows, rest), (name,) = prod(want.shape[:-2]), want.shape[-2:], want.names
    turning = _latent(want).rope_dim
    view, still = (heads, rows, rest), rows - turning
    split, order = _pairs_to_halves((heads, turning, rest), axis=1)
    upper = Source(name, (heads * rows, rest), (heads, still, rest), Cut(view, 1, 0, still))
    lower = Source(name, (heads * rows, rest), (heads, turning, rest), Cut(view, 1, still, rows), split, order)
    return Leaf(want.path, want.shape, (upper, lower), axis=1)


def half_of_heads(want: Want) -> Leaf:
    """key_up or value_up out of one tensor that holds, head by head, the content of the key and then the value."""
    latent, (heads, size, rank), (name,) = _latent(want), want.shape, want.names
    whole = latent.content_dim + latent.value_dim
    first = 0 if want.path[-1] == "key_up" else latent.content_dim
    cut = Cut((heads, whole, rank), 1, first, first + size)
    return Leaf(want.path, want.shape, (Source(name, (heads * whole, rank), want.shape, cut),))


def _latent(want: Want) -> LatentConfig:
    if want.config.latent is None:
        raise ConfigError(f"{'/'.join(want.path)} belongs to latent attention, which {want.config.family} has not here")
    return want.config.latent
