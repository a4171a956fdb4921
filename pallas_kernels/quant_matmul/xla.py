"""Products with quantised weights for the compilers that fuse on their own: TPU's and GPU's.

Knows: XLA folds the conversion of whole numbers, and a scale that the sums take, into the product; a weight of several
groups it decodes to x's dtype first. CPU has a form of its own, `xla_cpu`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quant_matmul.arrays import Numbers, Offset, Product, Rows, Scale, group_of

_CONTRACT_LAST = (((1,), (1,)), ((), ()))


@partial(jax.jit, static_argnames=("dtype",))
def quant_matmul(x: Rows, values: Numbers, scale: Scale, offset: Offset | None, *, dtype: Any) -> Product:
    """As the reference, but for this: a weight of several groups, or with offsets, is rounded to x's dtype.

    Both sides of the product are of that dtype; float32 is multiplied as float32, and bfloat16 pays nothing for it.

    Jitted, so that a model of many layers traces it once. Raises ValueError where the groups do not divide i.
    """
    group = group_of(values, scale)
    if scale.shape[1] > 1 or offset is not None:
        return _product(x, _decode(values, scale, offset, group).astype(x.dtype)).astype(dtype)
    return (_product(x, values.astype(x.dtype)) * scale[:, 0].astype(jnp.float32)).astype(dtype)


def _product(x: Rows, weight: Rows) -> Product:
    return jax.lax.dot_general(x, weight, _CONTRACT_LAST, jax.lax.Precision.HIGHEST, jnp.float32)


def _decode(values: Numbers, scale: Scale, offset: Offset | None, group: int) -> Rows:
    apart = values.reshape(len(values), -1, group).astype(jnp.float32) * scale.astype(jnp.float32)[:, :, None]
    if offset is not None:
        apart = apart + offset.astype(jnp.float32)[:, :, None]
    return apart.reshape(values.shape)
