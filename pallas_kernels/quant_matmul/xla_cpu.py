"""Products with quantised weights in plain XLA on CPU, where a conversion is fast in one form only.

Knows: which form is fast where (docs/notes/006-quantised-weights.md). Sums are in float32. No form keeps a decoded
weight beyond the product that it is in.
"""

from functools import partial, reduce
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

from pallas_kernels.quant_matmul.arrays import Numbers, Offset, Product, Rows, Scale, group_of

_LANES = 32
"""Values that are kept side by side: four AVX2 registers of float32. A known small inner axis is what makes XLA's
conversion of int8 a vector loop; over one long axis it is five times slower."""
_CONTRACT_LAST = (((1,), (1,)), ((), ()))
_HIGHEST = jax.lax.Precision.HIGHEST
"""Says nothing to a CPU; to an accelerator, where this form may be asked for by name, that float32 is to stay that."""


@partial(jax.jit, static_argnames=("dtype",))
def quant_matmul(x: Rows, values: Numbers, scale: Scale, offset: Offset | None, *, dtype: Any) -> Product:
    """As the reference. int4 is met as the even values of each row, and the odd ones.

    Jitted, so that a model of many layers traces it once. Raises ValueError where the groups do not divide i.
    """
    group, x, scale = group_of(values, scale), x.astype(jnp.float32), scale.astype(jnp.float32)
    if values.dtype != jnp.int4:
        pairs = [(x, values)]
    elif group % 2:
        pairs = [(x, values.astype(jnp.int8))]
    else:
        even, odd = _nibbles(values)
        pairs = [(x[:, ::2], even), (x[:, 1::2], odd)]
    product = _product(pairs, scale)
    if offset is not None:  # each group's offset meets the sum of its x
        sums = x.reshape(len(x), offset.shape[1], -1).sum(axis=-1)
        product = product + jax.lax.dot_general(sums, offset.astype(jnp.float32), _CONTRACT_LAST, _HIGHEST)
    return product.astype(dtype)


def _nibbles(values: Numbers) -> tuple[Int8[Array, "o half"], Int8[Array, "o half"]]:
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
        apart = (apart.reshape(*scale.shape, -1) * scale[:, :, None]).reshape(values.shape)
    return jax.lax.dot_general(x, apart, _CONTRACT_LAST, _HIGHEST)


def _one_row(pairs: Pairs, scale: Float32[Array, "o g"], lanes: int) -> Float[Array, "1 o"]:
    """One row as a sum of products: a matrix product would write the decoded weight to memory first."""
    rows, parts = scale.shape[0], pairs[0][1].shape[1] // lanes
    apart = [(x.reshape(1, parts, lanes), values.reshape(rows, parts, lanes)) for x, values in pairs]
    products = reduce(jnp.add, [values.astype(jnp.float32) * x for x, values in apart])
    if scale.shape[1] == 1:
        return (products.sum(axis=1).sum(axis=1) * scale[:, 0])[None]
    per_part = jnp.repeat(scale, parts // scale.shape[1], axis=1)
    return (products * per_part[:, :, None]).sum(axis=1).sum(axis=1)[None]
