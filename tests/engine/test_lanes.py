"""Pages in a TPU's lanes hold the same: written and attended to as in pages of the model's own shape."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import LatentConfig, MeshConfig
from jaxinfer.engine.cache import page_bytes
from jaxinfer.engine.lanes import PageLanes, page_lanes
from jaxinfer.engine.ops import PagedOps
from jaxinfer.engine.sharding import make_mesh, pages_sharding
from jaxinfer.model.ops import TokenBatch
from pallas_kernels.pages import empty_pages

from .driver import MODEL

LATENT = replace(MODEL, kv_heads=4, latent=LatentConfig(rank=140, rope_dim=4, content_dim=4, value_dim=6))


def test_lanes_are_whole_on_tpu_and_shared_where_two_fit():
    assert page_lanes(replace(MODEL, head_dim=64), "bfloat16", "tpu") == PageLanes(1, 128, 64)
    assert page_lanes(replace(MODEL, head_dim=64), "int8", "tpu") == PageLanes(2, 128)
    assert page_lanes(replace(MODEL, head_dim=80), "bfloat16", "tpu") == PageLanes(2, 128)
    assert page_lanes(replace(MODEL, head_dim=128), "float32", "tpu") == PageLanes(2, 128)
    assert page_lanes(replace(MODEL, head_dim=256), "float32", "tpu") == PageLanes(2, 256)
    assert page_lanes(LATENT, "bfloat16", "tpu") == PageLanes(1, 256)
    for platform in ("cpu", "gpu"):
        assert page_lanes(replace(MODEL, head_dim=80), "int8", platform) == PageLanes(2, 80)
        assert page_lanes(LATENT, "float32", platform) == PageLanes(1, 144)


def test_a_page_costs_what_its_lanes_take():
    heads_of_64, heads_of_96 = (replace(MODEL, head_dim=c) for c in (64, 96))
    assert page_bytes(heads_of_64, 8, "bfloat16", platform="tpu") == page_bytes(heads_of_64, 8, "bfloat16")
    assert page_bytes(heads_of_96, 8, "bfloat16", platform="tpu") * 3 == page_bytes(heads_of_96, 8, "bfloat16") * 4


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("c", [64, 80, 144], ids=["64 together", "80", "latent of 144"])
def test_what_is_written_and_attended_to_does_not_depend_on_the_lanes(c, dtype, tokens, tensor):
    config = LATENT if c == 144 else replace(MODEL, head_dim=c)
    planes, k, _ = config.cache_shape
    random, g = np.random.default_rng(c), 2
    keys, values = random.standard_normal((2, 2, tokens, k, c)).astype(np.float32)
    queries = random.standard_normal((2, tokens, k, g, c)).astype(np.float32)
    positions = np.array([np.arange(9, 9 + tokens), np.arange(tokens)])
    batch = TokenBatch(positions, positions, np.array([[4, 1], [3, 0]]), positions[:, -1] + 1)
    before = random.standard_normal((2, 2, 9, k, c)).astype(np.float32)
    earlier = np.tile(np.arange(9), (2, 1))
    mesh = make_mesh(MeshConfig(tensor=tensor))

    @jax.jit(static_argnums=0)
    def run(ops, pages):
        pages = ops.write(pages, *(before if planes == 2 else (before[0], None)), batch._replace(positions=earlier))
        pages = ops.write(pages, keys, values if planes == 2 else None, batch)
        return ops.attend(queries, pages, batch, window=None, scale=0.1, softcap=None)

    mixed = []
    for lanes in (page_lanes(config, dtype, "cpu"), page_lanes(config, dtype, "tpu")):
        pages = empty_pages((5, lanes.planes, k, 8, lanes.features), jnp.dtype(dtype))
        pages = jax.device_put(pages, pages_sharding(config, mesh))
        mixed.append(run(PagedOps(lanes=lanes, mesh=mesh), pages))
    assert mixed[0].shape == queries.shape
    np.testing.assert_allclose(mixed[1], mixed[0], rtol=1e-5, atol=1e-5)
