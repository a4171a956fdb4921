"""Each row meets its own expert, nothing else is read or made, and nothing is gathered on two devices."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.config import ExpertsConfig, MeshConfig
from jaxinfer.engine.grouped import DENSE_ROWS, FEWEST_ROWS, MOST_ROWS, tile_rows
from jaxinfer.engine.ops import PagedOps
from jaxinfer.engine.sharding import make_mesh
from jaxinfer.model.experts import Experts
from jaxinfer.model.quantised import Quantised
from pallas_kernels.dispatch import OPERATIONS

from .driver import MODEL

CPU = PagedOps()
TPU, GPU = (PagedOps(dict.fromkeys(OPERATIONS, "reference"), platform=name) for name in ("tpu", "gpu"))
RNG = np.random.default_rng(4)
COUNT, INNER = 5, 32
SIZES = {  # rows: how many each expert owns; a tile has 1, 4 and 8 rows
    2: [[1, 1, 0, 0, 0], [0, 0, 0, 0, 2]],
    13: [[0, 4, 0, 8, 1], [13, 0, 0, 0, 0], [0, 0, 0, 0, 13], [3, 3, 3, 3, 1], [0, 5, 2, 6, 0]],
    37: [[0, 1, 16, 17, 3], [0, 0, 37, 0, 0], [9, 7, 8, 13, 0]],
}
EXPERTS = ExpertsConfig(4, 2, 32)
KINDS = ["float32", "int8", "bfloat16", "int4"]


def make(kind: str, out: tuple[int, ...]) -> Any:
    shape = (COUNT, *out, INNER)
    if kind == "int8":
        return Quantised(jnp.asarray(RNG.integers(-127, 128, shape), jnp.int8), scales(*shape[:-1], 1))
    if kind == "int4":
        groups = (*shape[:-1], 2)
        return Quantised(jnp.asarray(RNG.integers(-8, 8, shape), jnp.int4), scales(*groups), scales(*groups))
    return jnp.asarray(RNG.normal(size=shape), kind)


def scales(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.uniform(0.01, 0.1, shape), jnp.float32)


def rows_of(count: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(RNG.normal(size=(count, INNER)), dtype)


def one_by_one(x: Any, weight: Any, sizes: list[int]) -> np.ndarray:
    plain = np.asarray(weight.dequantise() if isinstance(weight, Quantised) else weight, np.float64)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    return np.stack([plain[owner] @ np.asarray(row, np.float64) for owner, row in zip(owners, x, strict=True)])


@pytest.mark.parametrize("out", [(6,), (2, 6)], ids=["down", "gate_up"])
@pytest.mark.parametrize(
    ("ops", "kind"),
    [*((CPU, kind) for kind in KINDS), *((ops, kind) for ops in (TPU, GPU) for kind in KINDS[:2]), (TPU, "int4")],
)
def test_each_row_meets_the_matrix_of_its_group(ops: PagedOps, kind: str, out: tuple[int, ...]):
    weight, dtype = make(kind, out), kind if kind == "bfloat16" else "float32"
    product = jax.jit(ops.grouped_matmul)
    for count, cases in SIZES.items():
        x = rows_of(count, dtype)
        for sizes in cases:
            got, expected = product(x, weight, jnp.array(sizes, jnp.int32)), one_by_one(x, weight, sizes)
            assert got.shape == (count, *out)
            assert got.dtype == dtype
            rough = (1e-2 if dtype == "bfloat16" else 1e-5) * np.abs(expected).max()
            np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=rough)


def test_tiles_are_of_one_row_or_of_an_experts_mean():
    assert [tile_rows(rows, 64) for rows in (8, 32)] == [1, 1]
    assert [tile_rows(rows, 64) for rows in (33, 64, 512, 4096, 4097)] == [FEWEST_ROWS, FEWEST_ROWS, 8, 64, 128]
    assert tile_rows(1 << 20, 64) == MOST_ROWS


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
@pytest.mark.parametrize("rows", [8, 512])
def test_nothing_is_made_of_the_size_of_all_experts_or_of_rows_times_experts(rows: int, kind: str):
    """One expert's matrix, decoded where it is quantised, the rows, and the result."""
    count, out, inner = 64, 96, 128
    weight: Any = jax.ShapeDtypeStruct((count, out, inner), kind)
    if kind != "float32":
        weight = Quantised(weight, jax.ShapeDtypeStruct((count, out, 1 if kind == "int8" else 4), jnp.float32))
    x, sizes = jax.ShapeDtypeStruct((rows, inner), jnp.float32), jax.ShapeDtypeStruct((count,), jnp.int32)
    step: Any = jax.jit(CPU.grouped_matmul).lower(x, weight, sizes).compile()
    expert, both = 4 * out * inner, 4 * rows * (inner + out)
    temporary = step.memory_analysis().temp_size_in_bytes
    assert temporary < 2 * (expert + both) + 65536
    assert temporary < expert * count / 4


def test_where_rows_are_many_the_host_starts_a_turn_for_each_tile():
    """On GPU too: every row times every expert would be made in memory."""
    weight, sizes = jax.ShapeDtypeStruct((4, 6, INNER), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    for rows, turns in ((4 * DENSE_ROWS, False), (4 * DENSE_ROWS + 1, True)):
        text = (
            jax.jit(GPU.grouped_matmul).lower(jax.ShapeDtypeStruct((rows, INNER), jnp.float32), weight, sizes).as_text()
        )
        assert ("stablehlo.while" in text) == turns


def test_a_row_is_the_same_whichever_rows_are_beside_it():
    """Row by row the same expert, in tiles that begin elsewhere and beside other rows: equal bits."""
    weight, product = make("float32", (2, 6)), jax.jit(CPU.grouped_matmul)
    row, others = rows_of(1), rows_of(12)
    results = [
        product(jnp.concatenate([others[:before], row, others[before:]]), weight, jnp.array(sizes, jnp.int32))[before]
        for before, sizes in [(0, [0, 0, 1, 5, 7]), (5, [5, 0, 1, 0, 7]), (9, [2, 1, 10, 0, 0]), (12, [0, 0, 13, 0, 0])]
    ]
    for one, other in pairwise(results):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("ops", [CPU, TPU, GPU], ids=["cpu", "tpu", "gpu"])
def test_two_devices_gather_no_expert(ops: PagedOps):
    """The products of a layer, gate and up split by their rows and down by its columns, are those of one device."""
    layer = Experts(replace(MODEL, experts=EXPERTS), EXPERTS, jnp.float32)
    x = jnp.asarray(RNG.normal(size=(3, 4, MODEL.width)), jnp.float32)
    boxed = jax.jit(lambda key: layer.init(key, x, ops))(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf.value, boxed, is_leaf=lambda leaf: hasattr(leaf, "names"))
    mesh = make_mesh(MeshConfig(tensor=2))
    split = {"gate_up": (None, None, "tensor"), "down": (None, None, "tensor")}
    specs = {name: NamedSharding(mesh, PartitionSpec(*split.get(name, ()))) for name in params["params"]}
    placed = {"params": jax.device_put(params["params"], specs)}
    step = jax.jit(lambda params, x: layer.apply(params, x, ops))
    compiled: Any = step.lower(placed, jax.device_put(x, NamedSharding(mesh, PartitionSpec()))).compile()
    gathered = [_elements(shape) for shape in re.findall(r"= \w+\[([\d,]*)\]\S* all-gather", compiled.as_text())]
    assert max(gathered, default=0) < EXPERTS.width * MODEL.width  # one matrix of one expert
    together = compiled(placed, jax.device_put(x, NamedSharding(mesh, PartitionSpec())))
    np.testing.assert_allclose(together, step(params, x), atol=1e-5)


def _elements(shape: str) -> int:
    return int(np.prod([int(size) for size in shape.split(",") if size]))
