"""Leaves that stay quantised as their file has them.

Knows: how values and scales go through the cuts, orders and joins that a leaf is made by, and what to do where a leaf
comes from tensors of several types. Knows no block type: a file hands out values, scales and offsets.
"""

from collections.abc import Mapping
from itertools import groupby
from math import gcd
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int8, Shaped

from jaxinfer.checkpoint.tensors import Tensors, empty, pieces
from jaxinfer.model.families import Leaf
from jaxinfer.model.families.leaves import Source
from jaxinfer.model.quantised import Quantised

_LEAST_UNIT = 8
"""Smaller groups would be more scale than values: such a leaf is decoded."""


class Grouping(NamedTuple):
    """How a tensor is quantised: bits of a value (4 or 8), values per scale, values per offset (0: it has none)."""

    bits: int
    scale: int
    offset: int


class StoredTensors(Tensors, Protocol):
    """A checkpoint some of whose tensors are whole numbers with scales."""

    def grouping(self, name: str) -> Grouping | None:
        """How the tensor `name` is quantised; None where it is plain. Groups lie along the last axis."""
        ...

    def read_quantised(
        self, name: str, start: int, stop: int
    ) -> tuple[Int8[np.ndarray, "..."], Float32[np.ndarray, "..."], Float32[np.ndarray, "..."] | None]:
        """values, scale and offset of rows `start` to `stop` along the first axis."""
        ...


class _Plan(NamedTuple):
    """How a leaf is kept: its values' dtype, and the groups of its scales and offsets (0: it has none)."""

    groupings: Mapping[str, Grouping]
    values: np.dtype
    scale_unit: int
    offset_unit: int


def build_stored(tensors: StoredTensors, leaf: Leaf, dtype: np.dtype) -> Quantised | None:
    """The leaf in host memory as its tensors have it, for a weight of `dtype`; None where it has to be decoded.

    That is where one of its tensors is plain, or its groups are torn apart on the way into our layout. Tensors of
    several types become int8 with the finest of their groups, and offsets of 0 where only others have any: the weight
    is the same. No tensor is decoded; a piece of one at a time is beside the leaf.
    """
    plan = _plan(tensors, leaf)
    if plan is None:
        return None
    values, scale = _Joined(leaf, 1, plan.values), _Joined(leaf, plan.scale_unit, np.dtype(np.float32))
    offset = _Joined(leaf, plan.offset_unit, np.dtype(np.float32)) if plan.offset_unit else None
    for name, group in groupby(leaf.sources, key=lambda source: source.name):
        sources = tuple(group)
        for joined, tensor in zip((values, scale, offset), _read(tensors, name, plan), strict=True):
            if joined is not None and tensor is not None:
                joined.add(sources, tensor)
    return Quantised(values.whole, scale.whole, None if offset is None else offset.whole, dtype.name)


def stored_struct(tensors: StoredTensors, leaf: Leaf, dtype: np.dtype) -> Quantised | None:
    """Shapes and dtypes of what `build_stored` makes; nothing is read."""
    plan = _plan(tensors, leaf)
    if plan is None:
        return None
    units = [unit for unit in (plan.scale_unit, plan.offset_unit) if unit]
    groups = [jax.ShapeDtypeStruct(_per(unit, leaf.shape), np.float32) for unit in units]
    return Quantised(jax.ShapeDtypeStruct(leaf.shape, plan.values), *groups, dtype=dtype.name)


def _plan(tensors: StoredTensors, leaf: Leaf) -> _Plan | None:
    found = {source.name: tensors.grouping(source.name) for source in leaf.sources}
    groupings = {name: grouping for name, grouping in found.items() if grouping is not None}
    if len(groupings) < len(found):
        return None
    scale = _unit(leaf, {name: grouping.scale for name, grouping in groupings.items()})
    offset = _unit(leaf, {name: grouping.offset for name, grouping in groupings.items() if grouping.offset})
    if min(scale, offset) < _LEAST_UNIT:
        return None
    small = all(grouping.bits == 4 for grouping in groupings.values())
    offsets = any(grouping.offset for grouping in groupings.values())
    return _Plan(groupings, np.dtype(jnp.int4 if small else np.int8), scale, offset if offsets else 0)


def _unit(leaf: Leaf, groups: Mapping[str, int]) -> int:
    """The largest group that divides those of all tensors and every last axis on the way into the leaf.

    0 where a step moves the last axis, which would tear groups apart.
    """
    unit = leaf.shape[-1]
    for source in leaf.sources:
        if not _keeps_last(source):
            return 0
        steps = [source.shape, source.part, source.cut.view if source.cut else None, source.split]
        unit = gcd(unit, *(step[-1] for step in steps if step is not None))
        unit = gcd(unit, groups[source.name]) if source.name in groups else unit
    return unit


def _keeps_last(source: Source) -> bool:
    cut_elsewhere = source.cut is None or source.cut.axis < len(source.cut.view) - 1
    return cut_elsewhere and (source.order is None or source.order[-1] == len(source.order) - 1)


class _Joined:
    """The parts of a leaf joined, one entry in place of each `unit` neighbours along the last axis."""

    def __init__(self, leaf: Leaf, unit: int, dtype: np.dtype) -> None:
        self._leaf, self._unit, self._at = leaf, unit, 0
        shape = list(leaf.sources[0].part)
        shape[leaf.axis] = sum(source.part[leaf.axis] for source in leaf.sources)
        self._array = empty(_per(unit, tuple(shape)), dtype)

    def add(self, sources: tuple[Source, ...], tensor: Shaped[np.ndarray, "..."]) -> None:
        """Put the parts that `tensor` is the source of behind those that are there."""
        axis = self._leaf.axis
        for source in sources:
            part = _in_units(source, self._unit).place(tensor)
            stop = self._at + part.shape[axis]
            self._array[(slice(None),) * axis + (slice(self._at, stop),)] = part
            self._at = stop

    @property
    def whole(self) -> Shaped[np.ndarray, "..."]:
        """The leaf's own shape, in units."""
        return self._array.reshape(_per(self._unit, self._leaf.shape))


def _per(unit: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // unit)


def _in_units(source: Source, unit: int) -> Source:
    """The source of an array that has one entry in place of each `unit` neighbours along the last axis."""
    cut = source.cut if source.cut is None else source.cut._replace(view=_per(unit, source.cut.view))
    split = source.split if source.split is None else _per(unit, source.split)
    return source._replace(shape=_per(unit, source.shape), part=_per(unit, source.part), cut=cut, split=split)


def _read(
    tensors: StoredTensors, name: str, plan: _Plan
) -> tuple[Shaped[np.ndarray, "..."], Float32[np.ndarray, "..."], Float32[np.ndarray, "..."] | None]:
    """The tensor's values, and its scales and offsets repeated to the units of the plan."""
    shape, grouping = tensors.shapes[name], plan.groupings[name]
    values = np.empty(shape, plan.values)
    scale = np.empty(_per(plan.scale_unit, shape), np.float32)
    offset = np.zeros(_per(plan.offset_unit, shape), np.float32) if plan.offset_unit else None
    for start, stop in pieces(shape):
        values[start:stop], piece, offsets = tensors.read_quantised(name, start, stop)
        scale[start:stop] = np.repeat(piece, grouping.scale // plan.scale_unit, axis=-1)
        if offset is not None and offsets is not None:
            offset[start:stop] = np.repeat(offsets, grouping.offset // plan.offset_unit, axis=-1)
    return values, scale, offset
