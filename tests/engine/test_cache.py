"""The size of the page pool."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.config import CacheConfig, EngineConfig, LatentConfig, MeshConfig
from jaxinfer.engine.cache import cache_dtype, make_pages, page_bytes, pages_per_sequence, pool_bytes, pool_pages
from jaxinfer.engine.sharding import make_mesh, pages_sharding
from jaxinfer.errors import ConfigError
from jaxinfer.roofline import kv_bytes_per_token

from .driver import MODEL

ENGINE = EngineConfig(slots=4, chunk=32, cache=CacheConfig(page_size=8, memory_fraction=0.5))
PAGE = page_bytes(MODEL, 8, "float32")


def test_a_page_has_the_bytes_of_its_arrays():
    for dtype in ("float32", "bfloat16"):
        pool = make_pages(MODEL, 6, 8, dtype, make_mesh(MeshConfig()))
        assert sum(layer.nbytes for layer in pool) == 6 * page_bytes(MODEL, 8, dtype)
    assert page_bytes(MODEL, 8, "bfloat16") * 2 == PAGE


def test_the_pool_is_zeroed_and_made_on_the_mesh():
    mesh = make_mesh(MeshConfig(tensor=2))
    pool = make_pages(MODEL, 6, 8, "float32", mesh)
    assert len(pool) == MODEL.layers
    for layer in pool:
        assert layer.shape == (6, 2, MODEL.kv_heads, 8, MODEL.head_dim)
        assert layer.sharding == pages_sharding(MODEL, mesh)
        assert not jnp.any(layer)


LATENT = replace(MODEL, kv_heads=4, head_dim=12, latent=LatentConfig(rank=16, rope_dim=4, content_dim=8, value_dim=8))


def test_a_latent_is_one_plane_that_every_device_holds():
    mesh = make_mesh(MeshConfig(tensor=2))
    pool = make_pages(LATENT, 6, 8, "float32", mesh)
    for layer in pool:
        assert layer.shape == (6, 1, 1, 8, 20)
        assert layer.sharding.is_fully_replicated
    held = sum(shard.data.nbytes for layer in pool for shard in layer.addressable_shards)
    assert held == 6 * page_bytes(LATENT, 8, "float32", 2) == 12 * page_bytes(LATENT, 8, "float32")
    room = 20 * page_bytes(LATENT, 8, "float32")
    pages = [pool_pages(LATENT, replace(ENGINE, mesh=MeshConfig(n)), 128, "float32", lambda: room) for n in (1, 2)]
    assert pages == [20, 10]


def test_the_roofline_counts_the_bytes_of_a_page():
    for model in (MODEL, LATENT):
        assert page_bytes(model, 8, "bfloat16") == 8 * kv_bytes_per_token(model, 2)


@pytest.mark.parametrize("model", [replace(MODEL, head_dim=64), LATENT])
def test_an_int8_page_is_numbers_of_one_byte_and_scales(model):
    mesh = make_mesh(MeshConfig(tensor=2))
    pool = make_pages(model, 6, 8, "int8", mesh)
    planes, heads, features = model.cache_shape
    for layer in pool:
        assert layer.numbers.shape == (6, planes, heads, 8, features)
        assert layer.scales.shape == (6, planes, heads, 8)
        for leaf in layer:
            assert leaf.sharding.is_equivalent_to(pages_sharding(model, mesh), leaf.ndim)
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(pool) for shard in leaf.addressable_shards)
    assert held == 6 * page_bytes(model, 8, "int8", 2)
    assert page_bytes(model, 8, "int8") == 8 * kv_bytes_per_token(model, 1)


def test_a_pool_of_int8_holds_more_than_three_times_the_tokens():
    model, large = replace(MODEL, head_dim=64), replace(ENGINE, slots=400)
    room = 40 * page_bytes(model, 8, "float32")
    eight = replace(large, cache=replace(large.cache, dtype="int8"))
    pages = [pool_pages(model, engine, 128, cache_dtype(engine, "float32"), lambda: room) for engine in (large, eight)]
    assert pages[0] == 40
    assert pages[1] >= 3.5 * pages[0]


def test_a_table_covers_the_context():
    assert [pages_per_sequence(8, context) for context in (1, 8, 9, 128)] == [1, 1, 2, 16]


@pytest.mark.parametrize(
    ("room", "pages"),
    [(2 * PAGE, 2), (10 * PAGE, 10), (10 * PAGE - 1, 9), (64 * PAGE, 64), (5_000 * PAGE, 64)],
)
def test_pages_are_what_fits_up_to_what_the_slots_can_fill(room, pages):
    assert pool_pages(MODEL, ENGINE, 128, "float32", lambda: room) == pages


def test_a_little_more_or_less_memory_gives_the_same_pool():
    """Its size is a shape of every executable: else each start would compile all of them anew."""
    large = replace(ENGINE, slots=4_000)
    sizes = {pool_pages(MODEL, large, 128, "float32", lambda n=pages: PAGE * n) for pages in range(1_580, 1_640)}
    assert sizes == {1_536}


def test_pages_asked_for_are_given_without_a_look_at_the_memory():
    """Some accelerators do not report it."""

    def not_asked():
        pytest.fail("asked for the memory")

    asked = replace(ENGINE, cache=CacheConfig(page_size=8, pages=7))
    assert pool_pages(MODEL, asked, 128, "float32", not_asked) == 7
    too_many = replace(ENGINE, cache=CacheConfig(page_size=8, pages=1_000))
    assert pool_pages(MODEL, too_many, 128, "float32", not_asked) == 64


def test_too_little_memory_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"memory_fraction 0.5 is .* MiB and holds 1 pages .* expected 2 or more"):
        pool_pages(MODEL, ENGINE, 128, "float32", lambda: PAGE + 1)
    assert pool_pages(MODEL, ENGINE, 8, "float32", lambda: PAGE + 1) == 1  # a context of one page needs no second


@pytest.mark.parametrize(("available", "expected"), [(900, 200), (200, 200), (199, 39)])
def test_the_pool_is_a_share_of_the_hosts_memory_whatever_else_runs(monkeypatch, available, expected):
    """On CPU. Where the share is not free any more, it is a share of what is."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=1_000, available=available))
    assert pool_bytes(make_mesh(MeshConfig()), 0.2) == expected
