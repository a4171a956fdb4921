"""A kernel refuses what the TPU that it would be compiled for cannot do; elsewhere there is nothing to ask."""

from contextlib import AbstractContextManager
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import tpu_chip


def on(kind: str) -> AbstractContextManager[None]:
    """Traced for a TPU of that kind, as under `jax.set_mesh` of a mesh of such TPUs."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("TPU v4", 4), ("TPU v5 lite", 5), ("TPU v5", 5), ("TPU v6 lite", 6), ("TPU7x", 7), ("TPU of tomorrow", None)],
)
def test_tells_the_generation_that_the_mesh_is_of(kind: str, expected: int | None) -> None:
    with on(kind):
        assert tpu_chip.generation() == expected


def test_there_is_none_where_there_is_no_tpu() -> None:
    assert tpu_chip.generation() is None


def test_a_step_is_traced_anew_for_another_tpu() -> None:
    """A refusal of one is no refusal of the other, though both come through one jitted function."""

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        tpu_chip.refuse_v4("too slow")
        return x + 1

    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    jax.eval_shape(step, x)
    with on("TPU v4"), pytest.raises(NotImplementedError, match="a TPU v4: too slow"):
        jax.eval_shape(step, x)
    with on("TPU v5 lite"):
        jax.eval_shape(step, x)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_dtypes_that_no_kernel_loads_are_refused_by_name(dtype: str) -> None:
    good = [SimpleNamespace(dtype=jnp.dtype(name)) for name in ("float32", "bfloat16", "int8")]
    tpu_chip.require_dtypes(a=good[0], b=good[1], c=good[2])
    with pytest.raises(NotImplementedError, match=f"pages of {dtype}: TPU kernels load float32, bfloat16, int8"):
        tpu_chip.require_dtypes(queries=good[0], pages=SimpleNamespace(dtype=jnp.dtype(dtype)))
