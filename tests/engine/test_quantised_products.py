"""Products with quantised weights equal those with the decoded ones, in the form of each platform."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import MeshConfig
from jaxinfer.engine.ops import PagedOps
from jaxinfer.engine.sharding import make_mesh
from jaxinfer.model.quantised import Quantised
from pallas_kernels.dispatch import OPERATIONS

CPU = PagedOps()
OTHER = PagedOps(dict.fromkeys(OPERATIONS, "reference") | {"quant_matmul": "xla"}, platform="tpu")
RNG = np.random.default_rng(3)


def make(shape: tuple[int, ...], groups: tuple[int, ...], bits: int, offset: bool) -> Quantised:
    ends = (-8, 8) if bits == 4 else (-127, 128)
    values = jnp.asarray(RNG.integers(*ends, shape), jnp.int4 if bits == 4 else jnp.int8)
    scale = jnp.asarray(RNG.uniform(0.01, 0.1, groups), jnp.float32)
    return Quantised(values, scale, jnp.asarray(RNG.normal(size=groups), jnp.float32) if offset else None)


CASES = {
    "by channel": ((40, 96), (40, 1), 1),
    "in groups": ((40, 96), (40, 3), 1),
    "in groups of 16": ((40, 96), (40, 6), 1),
    "in long groups": ((40, 192), (40, 2), 1),
    "in odd groups": ((40, 33), (40, 3), 1),
    "in small groups": ((40, 12), (40, 3), 1),
    "of an odd axis": ((40, 7), (40, 1), 1),
    "qkv": ((2, 4, 16, 64), (2, 4, 16, 2), 1),
    "qkv by channel": ((2, 4, 16, 64), (2, 4, 16, 1), 1),
    "out": ((48, 2, 3, 64), (48, 2, 3, 2), 3),
    "out by channel": ((48, 2, 3, 64), (48, 1, 1, 1), 3),
}


@pytest.mark.parametrize(
    ("ops", "case", "bits", "offset"),
    [
        *((CPU, case, bits, bits == 4) for case in CASES for bits in (8, 4)),
        *((CPU, case, bits, bits == 8) for case in ("by channel", "in groups") for bits in (8, 4)),
        *((OTHER, case, 4, offset) for case in ("qkv", "out by channel") for offset in (False, True)),
    ],
)
def test_matmul_equals_that_with_the_decoded_weight(ops: PagedOps, case: str, bits: int, offset: bool):
    shape, groups, axes = CASES[case]
    weight = make(shape, groups, bits, offset)
    last = tuple(range(-axes, 0))
    product = jax.jit(lambda x, weight: ops.matmul(x, weight, axes=axes))
    for rows in ((1, 1), (3, 2)):
        x = RNG.normal(size=(*rows, *shape[-axes:])).astype(np.float32)
        expected = np.tensordot(x, np.asarray(weight.dequantise(), np.float64), axes=(last, last))
        np.testing.assert_allclose(product(x, weight), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("ops", [CPU, OTHER], ids=["cpu", "other"])
@pytest.mark.parametrize("groups", [(40, 1), (40, 3)])
def test_matmul_in_bfloat16_sums_in_float32_and_returns_what_is_asked(ops: PagedOps, groups: tuple[int, ...]):
    weight = make((40, 96), groups, 8, offset=False)
    x = jnp.asarray(RNG.normal(size=(2, 96)), jnp.bfloat16)
    assert ops.matmul(x, weight).dtype == jnp.bfloat16
    wide = ops.matmul(x, weight, dtype=jnp.float32)
    assert wide.dtype == jnp.float32
    expected = np.asarray(x, np.float64) @ np.asarray(weight.dequantise(), np.float64).T
    rough = 1e-4 if groups[-1] == 1 or ops is CPU else 1e-2  # elsewhere grouped weights are rounded to bfloat16
    np.testing.assert_allclose(wide, expected, atol=rough * np.abs(expected).max())


@pytest.mark.parametrize("offset", [True, False])
def test_take_decodes_the_rows_that_are_taken(offset: bool):
    table = make((9, 64), (9, 2), 8, offset)
    ids = jnp.array([[3, 3], [8, 0]])
    np.testing.assert_array_equal(CPU.take(table, ids), table.dequantise()[ids])


@pytest.mark.parametrize("bits", [8, 4])
def test_one_row_makes_no_decoded_weight_in_memory(bits: int):
    weight: Any = make((1024, 1024), (1024, 32), bits, offset=True)
    step = jax.jit(lambda x, weight: CPU.matmul(x, weight)).lower(np.ones((1, 1024), np.float32), weight).compile()
    memory = step.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4 * 1024 * 1024 / 2


def test_weights_over_several_devices_are_left_to_the_compiler():
    mesh = make_mesh(MeshConfig(tensor=2))
    split = PagedOps({"kv_write": "reference"}, platform="tpu", mesh=mesh)
    assert [kernel.form for kernel in split.kernels if kernel.operation == "quant_matmul"] == ["xla"]
    assert "the compiler splits" in split.why
    weight, x = make((40, 96), (40, 3), 8, offset=True), jnp.asarray(RNG.normal(size=(2, 96)), jnp.float32)
    np.testing.assert_allclose(split.matmul(x, weight), OTHER.matmul(x, weight), atol=1e-4)
    with pytest.raises(ValueError, match="quant_matmul has no choice"):
        PagedOps({"quant_matmul": "xla"}, platform="tpu", mesh=mesh)
