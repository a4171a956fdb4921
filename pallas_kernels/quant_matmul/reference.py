"""What a product with a quantised weight means: the weight decoded in float32, and a matrix product."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quant_matmul.arrays import Numbers, Offset, Product, Rows, Scale, group_of


def quant_matmul(x: Rows, values: Numbers, scale: Scale, offset: Offset | None, *, dtype: Any) -> Product:
    """x times (values * scale + offset) transposed, in float32; the result is of `dtype`.

    Entry j of a row of scale and offset (None: 0) is that of the values j * (i // groups) up to the next; groups divide
    i, and 1 is one scale per output. Raises ValueError where they do not divide it.
    """
    group = group_of(values, scale)
    weight = values.astype(jnp.float32) * jnp.repeat(scale.astype(jnp.float32), group, axis=1)
    if offset is not None:
        weight = weight + jnp.repeat(offset.astype(jnp.float32), group, axis=1)
    contract_last = (((1,), (1,)), ((), ()))
    product = jax.lax.dot_general(x.astype(jnp.float32), weight, contract_last, precision=jax.lax.Precision.HIGHEST)
    return product.astype(dtype)
