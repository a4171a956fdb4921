"""What an array takes in a TPU's vector memory (VMEM), and what TPUs lack that a kernel would need: dtypes that Mosaic
cannot load, and speed that v4 does not have.

Pallas compiles a kernel for the TPU of the mesh that `jax.set_mesh` set, or else for the first local device, and says
which that is. Elsewhere (interpreted on a CPU, exported for a TPU that is not there) there is nothing to ask.
"""

from math import prod
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8)
"""Of queries and pages. float16 no generation's Mosaic loads from VMEM (libtpu 0.0.42)."""
V4 = 4
LANES = 128
"""Numbers of a row of a register."""


def vmem_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes that an array takes in VMEM, in whole tiles."""
    rows, tile = shape[-2], 32 // itemsize
    return prod(shape[:-2]) * -(-rows // tile) * tile * -(-shape[-1] // LANES) * LANES * itemsize


def require_dtypes(**arrays: Any) -> None:
    """Raises NotImplementedError for an array whose numbers a kernel cannot load; they are told by their names."""
    for name, array in arrays.items():
        if array.dtype not in DTYPES:
            expected = ", ".join(jnp.dtype(dtype).name for dtype in DTYPES)
            raise NotImplementedError(f"{name} of {array.dtype}: TPU kernels load {expected}")


def refuse_v4(why: str) -> None:
    """Raises NotImplementedError, with the reason, where the TPU is a v4."""
    if generation() == V4:
        raise NotImplementedError(f"a TPU v4: {why}")


def generation() -> int | None:
    """Of the TPU that Pallas would compile for; None where it is none, or one that this JAX does not know."""
    try:
        return pltpu.get_tpu_info().generation
    except ValueError:  # "Unsupported TPU device kind: cpu"
        return None
