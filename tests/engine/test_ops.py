"""What a product asks of the compiler of an accelerator."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.engine.ops import PagedOps
from jaxinfer.model.quantised import Quantised
from pallas_kernels.dispatch import OPERATIONS

TPU = PagedOps(dict.fromkeys(OPERATIONS, "reference"), platform="tpu")
INT8 = jnp.ones((6, 2, 4), jnp.int8)
WEIGHTS = {
    "plain": jnp.ones((6, 2, 4)),
    "int8 by channel": Quantised(INT8, jnp.ones((6, 1, 1))),
    "int8 in groups": Quantised(INT8, jnp.ones((6, 2, 2)), jnp.ones((6, 2, 2))),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_float32_product_is_float32(kind: str):
    """Left alone, a TPU would round both sides to bfloat16 first, and a GPU to TF32."""
    traced: Any = jax.make_jaxpr(lambda x, weight: TPU.matmul(x, weight, axes=2))(jnp.ones((3, 2, 4)), WEIGHTS[kind])
    products = str(traced).split("dot_general[")[1:]
    assert products
    assert all("precision=(Precision.HIGHEST, Precision.HIGHEST)" in product for product in products)
