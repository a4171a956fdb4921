"""The product of a mixture of experts: a walk over tiles of rows, one expert's matrix a turn.

Knows: how rows that lie in order of their experts are cut into tiles, and where XLA's own form is taken. Knows nothing
of how one matrix is multiplied, which is the same whether it is an expert's or an MLP's, plain or quantised.

`jax.lax.ragged_dot` says all of it, but XLA makes it a product of every row with every expert, on CPU, on TPU and on
GPU alike (docs/notes/011-experts.md).
"""

from collections.abc import Callable
from itertools import product as indices
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from jaxinfer.model.ops import HIGHEST
from jaxinfer.model.quantised import Quantised, Weight

FEWEST_ROWS, MOST_ROWS = 4, 256
"""Bounds of a tile's rows, beside 1. With two rows XLA on CPU is slower than with four; above 256 nothing is gained."""
DENSE_ROWS = 32
"""Rows for each expert up to which GPU takes XLA's form: there the host starts each turn of a loop, some 20 us, and a
product of few rows with every expert takes little longer than reading them all. Reckoned, not measured."""
Product = Callable[[Float[Array, "n i"], Weight], Float[Array, "n o"]]
"""x [n, i] times a matrix [o, i] transposed, as `Ops.matmul` does it."""


class _Tiles(NamedTuple):
    """Each expert's tiles lie one after another, the first at the expert's first row."""

    rows: int
    ends: Int32[Array, " e"]
    """Tiles of the experts up to this one."""
    shifts: Int32[Array, " e"]
    """What takes rows * the number of a tile to the row that it starts at."""

    def locate(self, tile: Int32[Array, ""]) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
        """The expert of a tile, and the tile's first row."""
        expert = (self.ends <= tile).sum(dtype=jnp.int32)
        return expert, tile * self.rows + self.shifts[expert]


def grouped_matmul(
    x: Float[Array, "n i"],
    weight: Float[Array, "e *out i"] | Quantised,
    sizes: Int32[Array, " e"],
    product: Product,
    platform: str,
) -> Float[Array, "n *out"]:
    """Each row of x times the matrix of its group: the first sizes[0] rows times weight[0], and so on."""
    if platform == "gpu" and len(x) <= DENSE_ROWS * len(sizes):
        return _ragged(x, weight.dequantise().astype(x.dtype) if isinstance(weight, Quantised) else weight, sizes)
    return _walk(x, weight, sizes, product)


def _ragged(
    x: Float[Array, "n i"], weight: Float[Array, "e *out i"], sizes: Int32[Array, " e"]
) -> Float[Array, "n *out"]:
    """XLA's form. All axes stay as they are: merged, one that is split over devices would have to be gathered."""
    dims = jax.lax.RaggedDotDimensionNumbers((((1,), (weight.ndim - 1,)), ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(x, weight, sizes, dims, HIGHEST)


def _walk(
    x: Float[Array, "n i"], weight: Float[Array, "e *out i"] | Quantised, sizes: Int32[Array, " e"], product: Product
) -> Float[Array, "n *out"]:
    """A turn for each tile; experts without rows are never read.

    A tile takes whole rows whatever its expert owns: those past the expert's last are another's, and are written anew
    by that one's tile, which comes later. Where an expert has several matrices (gate and up) they are multiplied one by
    one, since the flat products of CPU would merge their axes.
    """
    rows, out = tile_rows(len(x), len(sizes)), weight.shape[1:-1]
    tiles, padded = _cut(sizes, rows), jnp.pad(x, ((0, rows - 1), (0, 0)))

    def turn(tile: Int32[Array, ""], result: Float[Array, "m *out"]) -> Float[Array, "m *out"]:
        expert, start = tiles.locate(tile)
        part = jax.lax.dynamic_slice_in_dim(padded, start, rows)
        parts = [product(part, _matrix(weight, (expert, *index))) for index in indices(*map(range, out[:-1]))]
        added = jnp.stack(parts, axis=1).reshape(rows, *out)
        return jax.lax.dynamic_update_slice_in_dim(result, added, start, axis=0)

    empty = jnp.zeros((len(padded), *out), x.dtype)
    return jax.lax.fori_loop(0, tiles.ends[-1], turn, empty)[: len(x)]


def tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile: 1 where most experts own none or one, else the mean of an expert, as a power of two in bounds."""
    if rows <= experts // 2:
        return 1
    mean = -(-rows // experts)
    return min(max(1 << (mean - 1).bit_length(), FEWEST_ROWS), MOST_ROWS)


def _cut(sizes: Int32[Array, " e"], rows: int) -> _Tiles:
    counts = -(-sizes // rows)
    ends = jnp.cumsum(counts)
    return _Tiles(rows, ends, jnp.cumsum(sizes) - sizes - rows * (ends - counts))


def _matrix(weight: Weight, index: tuple[int | Int32[Array, ""], ...]) -> Weight:
    """The matrix [o, i] at `index` of the axes before; of a quantised weight, that of each part."""
    return jax.tree.map(lambda part: _slice(part, index), weight)


def _slice(part: Shaped[Array, "e *out i"], index: tuple[int | Int32[Array, ""], ...]) -> Shaped[Array, "o i"]:
    """XLA on CPU slices int4 as bytes; the barrier keeps it from making bytes of every expert before the loop."""
    part, index = jax.lax.optimization_barrier((part, index)) if part.dtype == jnp.int4 else (part, index)
    zeros, sizes = (0,) * (part.ndim - len(index)), part.shape[len(index) :]
    return jax.lax.dynamic_slice(part, (*index, *zeros), ((1,) * len(index) + sizes)).reshape(sizes)
