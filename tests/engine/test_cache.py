"""The size of the page pool."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxinfer.config import CacheConfig, EngineConfig, MeshConfig
from jaxinfer.engine.cache import make_pages, page_bytes, pages_per_sequence, pool_bytes, pool_pages
from jaxinfer.engine.sharding import make_mesh, pages_sharding
from jaxinfer.errors import ConfigError

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
        assert layer.sharding == pages_sharding(mesh)
        assert not jnp.any(layer)


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
