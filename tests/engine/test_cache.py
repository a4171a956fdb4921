"""The size of the page pool."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxinfer.config import CacheConfig, EngineConfig, LatentConfig, MeshConfig
from jaxinfer.engine.cache import make_pages, page_bytes, pages_per_sequence, pool_bytes, pool_pages
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
    pages = [pool_pages(LATENT, replace(ENGINE, mesh=MeshConfig(n)), 128, "float32", room) for n in (1, 2)]
    assert pages == [20, 10]


def test_the_roofline_counts_the_bytes_of_a_page():
    for model in (MODEL, LATENT):
        assert page_bytes(model, 8, "bfloat16") == 8 * kv_bytes_per_token(model, 2)


def test_a_table_covers_the_context():
    assert [pages_per_sequence(8, context) for context in (1, 8, 9, 128)] == [1, 1, 2, 16]


@pytest.mark.parametrize(
    ("room", "pages"),
    [(2 * PAGE, 2), (10 * PAGE, 10), (10 * PAGE - 1, 9), (64 * PAGE, 64), (5_000 * PAGE, 64)],
)
def test_pages_are_what_fits_up_to_what_the_slots_can_fill(room, pages):
    assert pool_pages(MODEL, ENGINE, 128, "float32", room) == pages


def test_a_little_more_or_less_memory_gives_the_same_pool():
    """Its size is a shape of every executable: else each start would compile all of them anew."""
    large = replace(ENGINE, slots=4_000)
    sizes = {pool_pages(MODEL, large, 128, "float32", PAGE * pages) for pages in range(1_580, 1_640)}
    assert sizes == {1_536}


def test_pages_asked_for_are_given_whatever_is_free():
    asked = replace(ENGINE, cache=CacheConfig(page_size=8, pages=7))
    assert pool_pages(MODEL, asked, 128, "float32", 0) == 7
    too_many = replace(ENGINE, cache=CacheConfig(page_size=8, pages=1_000))
    assert pool_pages(MODEL, too_many, 128, "float32", 0) == 64


def test_too_little_memory_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"memory_fraction 0.5 is .* MiB and holds 1 pages .* expected 2 or more"):
        pool_pages(MODEL, ENGINE, 128, "float32", PAGE + 1)
    assert pool_pages(MODEL, ENGINE, 8, "float32", PAGE + 1) == 1  # a context of one page needs no second


@pytest.mark.parametrize(("available", "expected"), [(900, 200), (200, 200), (199, 39)])
def test_the_pool_is_a_share_of_the_hosts_memory_whatever_else_runs(monkeypatch, available, expected):
    """On CPU. Where the share is not free any more, it is a share of what is."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=1_000, available=available))
    assert pool_bytes(make_mesh(MeshConfig()), 0.2) == expected
