"""Products with quantised weights, in plain XLA: one form for CPU, one for the compilers that fuse on their own.

Knows: which form is fast where (docs/notes/006-quantised-weights.md). Sums are in float32. No form keeps a decoded
weight beyond the product that it is in.
"""

from functools import reduce
from math import gcd, prod
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8, Int32

from jaxinfer.model.quantised import Quantised, combine

_LANES = 32
"""Values that the CPU form keeps side by side: four AVX2 registers of float32. A known small inner axis is what makes
XLA's conversion of int8 a vector loop; over one long axis it is five times slower."""
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def matmul(x: Float[Array, "..."], weight: Quantised, *, axes: int, dtype: Any, cpu: bool) -> Float[Array, "..."]:
    """Contract the last `axes` axes of both; the result is of `dtype`, or of x's where that is None."""
    kept, out, dtype = x.shape[:-axes], weight.shape[:-axes], dtype or x.dtype
    if cpu:
        product = _flat(x.reshape(prod(kept), -1), _flattened(weight, axes))
        return product.reshape(*kept, *out).astype(dtype)
    dims = (tuple(range(x.ndim - axes, x.ndim)), tuple(range(weight.ndim - axes, weight.ndim)))
    if not _by_channel(weight, axes):
        whole = weight.dequantise().astype(x.dtype)
        return jax.lax.dot_general(x, whole, (dims, ((), ())), preferred_element_type=dtype)
    whole = weight.values.astype(x.dtype)
    product = jax.lax.dot_general(x, whole, (dims, ((), ())), preferred_element_type=jnp.float32)
    return (product * weight.scale.reshape(out)).astype(dtype)


def take(table: Quantised, ids: Int32[Array, "*any"]) -> Float[Array, "*any w"]:
    """Rows of a table by their number, decoded: only those that are taken."""
    return jax.tree.map(lambda part: part[ids], table).dequantise()


def _by_channel(weight: Quantised, axes: int) -> bool:
    return weight.offset is None and all(size == 1 for size in weight.scale.shape[-axes:])


def _flattened(weight: Quantised, axes: int) -> Quantised:
    """The weight [o, i], its scales [o, groups], its offsets alike: float32."""
    rows = prod(weight.shape[:-axes])
    offset = None if weight.offset is None else weight.offset.reshape(rows, -1).astype(jnp.float32)
    scale = weight.scale.reshape(rows, -1).astype(jnp.float32)
    return Quantised(weight.values.reshape(rows, -1), scale, offset)


def _flat(x: Float[Array, "n i"], weight: Quantised) -> Float32[Array, "n o"]:
    """x times weight transposed. int4 as the even values of each row, and the odd ones."""
    x, values = x.astype(jnp.float32), weight.values
    if values.dtype != jnp.int4:
        pairs = [(x, values)]
    elif (values.shape[1] // weight.scale.shape[1]) % 2:
        pairs = [(x, values.astype(jnp.int8))]
    else:
        even, odd = _nibbles(values)
        pairs = [(x[:, ::2], even), (x[:, 1::2], odd)]
    product = _product(pairs, weight.scale)
    if weight.offset is None:
        return product
    sums = x.reshape(x.shape[0], weight.offset.shape[1], -1).sum(axis=-1)  # each group's offset meets the sum of its x
    return product + jax.lax.dot_general(sums, weight.offset, _CONTRACT_LAST)


def _nibbles(values: Array) -> tuple[Int8[Array, "o half"], Int8[Array, "o half"]]:
    """The values at even and at odd places. XLA on CPU keeps two int4 in a byte but takes them out one at a time;
    shifted as bytes they are taken out a register at a time.
    """
    pairs = jax.lax.bitcast_convert_type(values.reshape(values.shape[0], -1, 2), jnp.int8)
    four = jnp.int8(4)
    return jnp.right_shift(jnp.left_shift(pairs, four), four), jnp.right_shift(pairs, four)


Pairs = list[tuple[Float32[Array, "n i"], Int8[Array, "o i"]]]
"""Parts of x, each with the values that it meets."""


def _product(pairs: Pairs, scale: Float32[Array, "o g"]) -> Float32[Array, "n o"]:
    """The sum over the pairs of x times (values * scale) transposed; scales of one group are applied to the sums."""
    lanes = gcd(pairs[0][1].shape[1] // scale.shape[1], _LANES)
    if pairs[0][0].shape[0] == 1 and lanes >= 8:
        return _one_row(pairs, scale, lanes)
    product = reduce(jnp.add, [_many_rows(x, values, scale, lanes) for x, values in pairs])
    return product * scale[:, 0] if scale.shape[1] == 1 else product


def _many_rows(
    x: Float32[Array, "n i"], values: Int8[Array, "o i"], scale: Float32[Array, "o g"], lanes: int
) -> Float32[Array, "n o"]:
    """A matrix product with the weight on the right, decoded but for the scales where these are of one group."""
    apart = values.reshape(len(values), -1, lanes).astype(jnp.float32).reshape(values.shape)
    if scale.shape[1] > 1:
        apart = combine(jnp.multiply, apart, scale)
    return jax.lax.dot_general(x, apart, _CONTRACT_LAST)


def _one_row(pairs: Pairs, scale: Float32[Array, "o g"], lanes: int) -> Float32[Array, "1 o"]:
    """One row as a sum of products: a matrix product would write the decoded weight to memory first."""
    rows, parts = scale.shape[0], pairs[0][1].shape[1] // lanes
    apart = [(x.reshape(1, parts, lanes), values.reshape(rows, parts, lanes)) for x, values in pairs]
    products = reduce(jnp.add, [values.astype(jnp.float32) * x for x, values in apart])
    if scale.shape[1] == 1:
        return (products.sum(axis=1).sum(axis=1) * scale[:, 0])[None]
    per_part = jnp.repeat(scale, parts // scale.shape[1], axis=1)
    return (products * per_part[:, :, None]).sum(axis=1).sum(axis=1)[None]
