"""The leaf that a quantised weight is: whole numbers, and per group of them a scale and perhaps an offset.

Knows: what the numbers stand for, which matrices may be quantised, and how such a leaf is placed on devices. The blocks
do not know it: they hand whatever leaf they have to `Ops`. How numbers are chosen is `checkpoint.quantise`'s.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Shaped

QUANTISED_ROLES = frozenset(
    {"embedding", "head", "qkv", "out", "query", "q_down", "q_up", "kv_down", "gate_up", "down"}
)
"""Last names of the leaves that may be quantised: every large matrix that `Ops` multiplies by. Norms, biases, routers
and sinks are small, and decide much; the latent's key_up and value_up are multiplied without `Ops`."""
NARROW = 1_024
"""Features below which a matrix that is contracted over them stays int8 in int4."""
GROUP = 32
"""Neighbours along the last axis that share a scale in int4, where this divides the axis."""


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale", "offset"], meta_fields=["dtype"])
@dataclass(frozen=True, eq=False)
class Quantised:
    """A weight w = values * scale + offset, of the shape of `values` (int8 or int4).

    scale and offset (None: 0) are float, with as many axes as values. Along an axis that is not contracted they have
    its size. Along the contracted axes they have size 1 (one group per output channel), or the axes' own sizes but for
    the last, where entry j is that of the values j * group to (j + 1) * group - 1. `values` is the first child, so that
    Flax compares its shape with the declared one. dtype names that of the plain weight it stands for.
    """

    values: Any
    scale: Any
    offset: Any = None
    dtype: str = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Axes of the weight."""
        return len(self.values.shape)

    def dequantise(self) -> Float[Array, "..."]:
        """The weight in its `dtype`, computed in float32 and rounded once."""
        wide = self.values.astype(jnp.float32)
        wide = combine(jnp.multiply, wide, self.scale.astype(jnp.float32))
        if self.offset is not None:
            wide = combine(jnp.add, wide, self.offset.astype(jnp.float32))
        return wide.astype(self.dtype)


Weight = Float[Array, "..."] | Quantised
"""What `Ops` multiplies by."""
Kind = Literal["int8", "int4"]


def combine(
    operation: Callable[[Any, Any], Any], whole: Shaped[Array, "..."], grouped: Shaped[Array, "..."]
) -> Shaped[Array, "..."]:
    """operation(whole, grouped), each entry of `grouped` meeting all values of its group along the last axis."""
    groups = grouped.shape[-1]
    apart = whole.reshape(*whole.shape[:-1], groups, whole.shape[-1] // groups)
    return operation(apart, grouped[..., None]).reshape(whole.shape)


def quantisable(path: tuple[str, ...]) -> bool:
    """Whether the leaf at `path` of the parameter tree may be quantised."""
    return path[-1] in QUANTISED_ROLES


def kind_of(path: tuple[str, ...], kind: Kind, shape: tuple[int, ...]) -> Kind:
    """What the matrix of `shape` at `path` becomes where weights are quantised as `kind`.

    In int4 two sorts stay int8: embedding and head, whose errors go straight into what is read and what is said, and
    what is contracted over fewer than NARROW features, which is little memory and, in the small models that have it,
    most of the loss (docs/notes/006).
    """
    narrow = prod(shape[-contracted_axes(path, len(shape)) :]) < NARROW
    return "int8" if narrow or path[-1] in ("embedding", "head") else kind


def contracted_axes(path: tuple[str, ...], ndim: int) -> int:
    """How many of the last axes of the matrix at `path` are contracted: attention's `out` keeps only its first."""
    return ndim - 1 if path[-1] == "out" else 1


def group_size(size: int) -> int:
    """Values of an int4 group along an axis of `size`: the largest divisor up to GROUP; the axis itself where that is
    below 8, since smaller groups would be more scale than values.
    """
    best = max(n for n in range(1, min(GROUP, size) + 1) if size % n == 0)
    return best if best >= 8 else size


def scale_shape(path: tuple[str, ...], shape: tuple[int, ...], kind: Kind) -> tuple[int, ...]:
    """The shape of the scale of the matrix at `path`: one per output channel in int8, one per group in int4."""
    if kind == "int8":
        axes = contracted_axes(path, len(shape))
        return (*shape[:-axes], *(1,) * axes)
    return (*shape[:-1], shape[-1] // group_size(shape[-1]))


def fits_groups(path: tuple[str, ...], shape: tuple[int, ...], groups: tuple[int, ...]) -> bool:
    """Whether scales (or offsets) of shape `groups` belong to a matrix of `shape` at `path`, as `Quantised` says."""
    axes = contracted_axes(path, len(shape))
    if len(groups) != len(shape) or groups[:-axes] != shape[:-axes]:
        return False
    by_group = groups[:-1] == shape[:-1] and groups[-1] > 0 and shape[-1] % groups[-1] == 0
    return by_group or all(size == 1 for size in groups[-axes:])


def scale_dtype(kind: Kind, dtype: Any) -> np.dtype:
    """That of scales beside weights of `dtype`: bfloat16 where groups are small and so is that, else float32."""
    return np.dtype(dtype if kind == "int4" and dtype == jnp.bfloat16 else np.float32)


def abstract(path: tuple[str, ...], leaf: jax.ShapeDtypeStruct, kind: Kind | None) -> Any:
    """What the leaf at `path` becomes where weights are quantised as `kind`; itself where it may not, or for None."""
    if kind is None or not quantisable(path):
        return leaf
    kind = kind_of(path, kind, leaf.shape)
    values = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(kind))
    scale = jax.ShapeDtypeStruct(scale_shape(path, leaf.shape, kind), scale_dtype(kind, leaf.dtype))
    return Quantised(values, scale, scale if kind == "int4" else None, leaf.dtype.name)


def spread(leaf: Any, whole: Sharding | None) -> Any:
    """The shardings of a leaf's arrays, given that of the plain weight; a plain leaf gets that one itself.

    An axis that is split stays so where its size divides evenly, and is whole on every device where it does not: a
    scale may have a single entry where the weight has many. None, the default device, stays None.
    """
    if whole is None:
        return None
    if not isinstance(leaf, Quantised) or not isinstance(whole, NamedSharding):
        return jax.tree.map(lambda part: whole, leaf)
    return jax.tree.map(lambda part: _fitting(part.shape, whole), leaf)


def _fitting(shape: tuple[int, ...], whole: NamedSharding) -> NamedSharding:
    spec = (*whole.spec, *(None,) * (len(shape) - len(whole.spec)))
    kept = [
        name if name is not None and size % whole.mesh.shape[name] == 0 else None
        for name, size in zip(spec, shape, strict=True)
    ]
    return NamedSharding(whole.mesh, PartitionSpec(*kept))


def spread_all(params: Any, shardings: Any) -> Any:
    """`spread` for every leaf of a tree of parameters, given the shardings of the plain weights."""
    return jax.tree.map(spread, params, shardings, is_leaf=is_quantised)


def is_quantised(leaf: Any) -> bool:
    """For `jax.tree.map(..., is_leaf=is_quantised)`."""
    return isinstance(leaf, Quantised)


def describe(params: Any) -> str:
    """How the large matrices of a tree of parameters are kept, most numerous first: "int4 in groups of 32 with offsets
    (95 % of the weights), int8 by channel (5 %)"; "" where all are plain.
    """
    matrices = _matrices(params)
    if not any(map(is_quantised, matrices)):
        return ""
    counts: Counter[str] = Counter()
    for leaf in matrices:
        counts[_form(leaf)] += prod(leaf.shape)
    total = sum(counts.values())
    return ", ".join(f"{form} ({round(100 * size / total)} %)" for form, size in counts.most_common())


def _form(leaf: Any) -> str:
    if not isinstance(leaf, Quantised):
        return str(leaf.dtype)
    group = prod(leaf.shape) // prod(leaf.scale.shape)
    grouped = leaf.scale.shape[-1] > 1 or leaf.offset is not None
    offsets = " with offsets" if leaf.offset is not None else ""
    return f"{leaf.values.dtype} " + (f"in groups of {group}{offsets}" if grouped else "by channel")


def parts_of(leaf: Any) -> list[Any]:
    """The arrays of a leaf, or their shapes and dtypes: those of a quantised one, or the plain one itself."""
    if not isinstance(leaf, Quantised):
        return [leaf]
    return [part for part in (leaf.values, leaf.scale, leaf.offset) if part is not None]


def bytes_of(part: Any) -> float:
    """Bytes of an array on a device, where two int4 share one; NumPy and `nbytes` count one for each."""
    integer = jnp.issubdtype(part.dtype, jnp.integer)
    return prod(part.shape) * (jnp.iinfo(part.dtype).bits / 8 if integer else part.dtype.itemsize)


def bytes_per_weight(params: Any) -> float:
    """Bytes that one weight of the large matrices takes on average, scales and offsets counted in."""
    matrices = _matrices(params)
    taken = sum(bytes_of(part) for leaf in matrices for part in parts_of(leaf))
    return taken / sum(prod(leaf.shape) for leaf in matrices)


def _matrices(params: Any) -> list[Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantised)
    return [leaf for path, leaf in flat if quantisable(tuple(key.key for key in path))]
