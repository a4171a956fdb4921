"""What a quantised leaf stands for, which leaves may be one, and where its arrays lie."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import ExpertsConfig, LatentConfig, ModelConfig
from jaxinfer.model.plain_ops import PlainWeights
from jaxinfer.model.quantised import (
    Quantised,
    bytes_of,
    bytes_per_weight,
    describe,
    fits_groups,
    group_size,
    parts_of,
    quantisable,
    scale_shape,
    spread,
)
from jaxinfer.model.transformer import abstract_params

pytestmark = pytest.mark.usefixtures("narrow_matrices_in_int4")

MODEL = ModelConfig(
    family="llama",
    vocab_size=50,
    width=64,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=32,
    mlp_width=96,
    context=64,
    query_scale=1.0,
)


def test_a_weight_is_values_times_the_scale_of_their_group_plus_its_offset():
    values = jnp.array([[1, -2, 3, 4], [5, 6, -7, 7]], jnp.int4)
    scale, offset = jnp.array([[2.0, 10.0], [0.5, 1.0]]), jnp.array([[0.25], [-1.0]])
    weight = Quantised(values, scale, offset, "float32")
    expected = [[2.25, -3.75, 30.25, 40.25], [1.5, 2.0, -8.0, 6.0]]
    np.testing.assert_array_equal(weight.dequantise(), expected)
    np.testing.assert_array_equal(PlainWeights().take(weight, jnp.array([1])), expected[1:])
    assert replace(weight, dtype="bfloat16").dequantise().dtype == jnp.bfloat16


def test_scales_of_one_group_span_all_contracted_axes():
    values, scale = jnp.ones((3, 2, 2, 4), jnp.int8), jnp.array([1.0, 2.0, 3.0]).reshape(3, 1, 1, 1)
    np.testing.assert_array_equal(Quantised(values, scale).dequantise()[:, 1, 1, 3], [1, 2, 3])


@pytest.mark.parametrize(
    ("size", "group"), [(64, 32), (576, 32), (48, 24), (80, 20), (36, 18), (8, 8), (33, 11), (7, 7), (74, 74)]
)
def test_groups_divide_the_axis(size: int, group: int):
    assert group_size(size) == group


def test_attention_s_output_has_one_scale_per_channel_over_heads_and_features():
    path = ("block_0", "attention", "out")
    assert scale_shape(path, (64, 2, 2, 32), "int8") == (64, 1, 1, 1)
    assert scale_shape(path, (64, 2, 2, 48), "int4") == (64, 2, 2, 2)
    assert scale_shape(("block_0", "experts", "down"), (4, 64, 96), "int8") == (4, 64, 1)


@pytest.mark.parametrize(
    ("groups", "fits"),
    [
        ((8, 1, 1), True),
        ((8, 4, 2), True),
        ((8, 4, 64), True),
        ((8, 1, 2), False),
        ((8, 4, 3), False),
        ((8, 4, 0), False),
        ((4, 4, 2), False),
        ((8, 4), False),
    ],
)
def test_groups_that_fit(groups: tuple[int, ...], fits: bool):
    assert fits_groups(("block_0", "attention", "out"), (8, 4, 64), groups) is fits


def quantised_paths(config: ModelConfig) -> set[str]:
    flat, _ = jax.tree_util.tree_flatten_with_path(abstract_params(config, jnp.float32))
    return {"/".join(key.key for key in path) for path, _ in flat if quantisable(tuple(key.key for key in path))}


def test_large_matrices_may_be_quantised_and_nothing_else():
    block = {"attention/qkv", "attention/out", "mlp/gate_up", "mlp/down"}
    biased = replace(MODEL, attention_bias=True, output_bias=True, mlp_bias=True, sinks=True, qk_norm="head")
    assert quantised_paths(biased) == {"embedding", "head", *(f"block_0/{name}" for name in block)}
    experts = ExpertsConfig(4, 2, 32, router_bias=True, selection_bias=True, shared_width=16)
    latent = LatentConfig(rank=16, rope_dim=16, content_dim=16, value_dim=16, query_rank=32)
    deep = replace(MODEL, kv_heads=4, experts=experts, latent=latent)
    block = {"q_down", "q_up", "kv_down", "out"}
    inner = {"gate_up", "down", "shared/gate_up", "shared/down"}
    expected = {f"block_0/attention/{name}" for name in block} | {f"block_0/experts/{name}" for name in inner}
    assert quantised_paths(deep) == {"embedding", "head", *expected}


def leaf(kind: Any, shape: tuple[int, ...], groups: tuple[int, ...], offset: bool = False) -> Quantised:
    scale = jax.ShapeDtypeStruct(groups, jnp.float32)
    return Quantised(jax.ShapeDtypeStruct(shape, kind), scale, scale if offset else None)


def test_bytes_count_two_int4_in_one():
    values, scale, offset = parts_of(leaf(jnp.int4, (8, 64), (8, 2), offset=True))
    assert (bytes_of(values), bytes_of(scale), bytes_of(offset)) == (256, 64, 64)
    assert bytes_of(jax.ShapeDtypeStruct((3, 5), jnp.bfloat16)) == 30
    tree = {"down": leaf(jnp.int8, (8, 64), (8, 1)), "head": jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)}
    assert bytes_per_weight({**tree, "mlp_norm": jax.ShapeDtypeStruct((9,), jnp.float32)}) == (512 + 32 + 1024) / 1024


def test_the_description_names_each_kind_and_its_share():
    plain = {"head": jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)}
    assert describe(plain) == ""
    tree = {
        "a": {"down": leaf(jnp.int4, (24, 64), (24, 2), offset=True)},
        "embedding": leaf(jnp.int8, (16, 64), (16, 1)),
        **plain,
    }
    expected = "int4 in groups of 32 with offsets (50 %), int8 by channel (33 %), bfloat16 (17 %)"
    assert describe(tree) == expected


def test_each_array_is_split_where_it_divides():
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))
    inner = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    placed = spread(leaf(jnp.int4, (8, 64), (8, 2), offset=True), inner)
    assert placed.values.spec == PartitionSpec(None, "tensor")
    assert placed.scale.spec == placed.offset.spec == PartitionSpec(None, None)
    outer = spread(leaf(jnp.int8, (8, 64), (8, 1)), NamedSharding(mesh, PartitionSpec("tensor")))
    assert outer.values.spec == outer.scale.spec == PartitionSpec("tensor", None)
    assert spread(np.ones(3), inner) is inner
    assert spread(leaf(jnp.int8, (8, 64), (8, 1)), None) is None


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_abstract_tree_says_what_quantising_makes(kind: Any):
    tree = abstract_params(MODEL, jnp.bfloat16, kind)
    out, table = tree["block_0"]["attention"]["out"], tree["embedding"]
    assert (out.values.dtype, out.shape, out.dtype) == (jnp.dtype(kind), (64, 2, 2, 32), "bfloat16")
    assert (out.scale.shape, out.scale.dtype, out.offset is None) == (
        ((64, 1, 1, 1), jnp.float32, True) if kind == "int8" else ((64, 2, 2, 1), jnp.bfloat16, False)
    )
    assert (table.values.dtype, table.scale.shape) == (jnp.int8, (50, 1))
    assert tree["final_norm"].dtype == jnp.float32
