"""The page pool: its size in pages and bytes, and its arrays.

Knows: bytes of a page, how much memory there is, how many pages are worth having. Does not know who owns a page: the
scheduler does.
"""

from collections.abc import Callable
from typing import Any

import jax
import psutil
from jax.sharding import Mesh

from jaxinfer.arrays import Pages
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.lanes import page_lanes
from jaxinfer.engine.sharding import pages_sharding, platform_of, splits_pages
from jaxinfer.errors import ConfigError
from pallas_kernels.pages import empty_pages


def pages_per_sequence(page_size: int, context: int) -> int:
    """Pages that a sequence of `context` tokens owns; the width of every page table."""
    return -(-context // page_size)


def cache_dtype(engine: EngineConfig, dtype: Any) -> Any:
    """What pages are made of: the cache's own dtype, else the model's; int8 pages carry scales."""
    return engine.cache.dtype or dtype


def page_bytes(config: ModelConfig, page_size: int, dtype: Any, devices: int = 1, platform: str | None = None) -> int:
    """Bytes of one page, its scales included, over all layers and `devices` of `platform` (default: JAX's own).

    Each device holds a part of it, or the whole where it does not split.
    """
    layer = jax.tree.leaves(jax.eval_shape(lambda: _layer(config, 1, page_size, dtype, platform)))
    copies = 1 if splits_pages(config, devices) else devices
    return config.layers * copies * sum(leaf.size * leaf.dtype.itemsize for leaf in layer)


def pool_bytes(mesh: Mesh, fraction: float) -> int:
    """Bytes for the pool, over all the mesh's devices: `fraction` of the host's memory on CPU, else of what is free.

    The host's whole memory counts, so that each start gets the same pool, unless so much is not free: then what is.
    Raises ConfigError where an accelerator does not report its memory.
    """
    devices = list(mesh.devices.flat)
    if devices[0].platform == "cpu":
        host = psutil.virtual_memory()
        share = int(host.total * fraction)
        return share if share <= host.available else int(host.available * fraction)
    stats = [device.memory_stats() for device in devices]
    if not all(stats):
        raise ConfigError(f"{devices[0].device_kind} does not report its memory; set cache.pages")
    return int(len(devices) * min(stat["bytes_limit"] - stat["bytes_in_use"] for stat in stats) * fraction)


def pool_pages(
    config: ModelConfig,
    engine: EngineConfig,
    context: int,
    dtype: Any,
    room: Callable[[], int],
    platform: str | None = None,
) -> int:
    """How many pages the pool gets: what is asked for or about what fits in `room` bytes, at most what all slots fill.

    dtype is that of the pages, on `platform` (default: JAX's own). room is called only where no number of pages is
    asked for: not every accelerator reports its memory. Raises ConfigError where fewer than two pages (or one, where a
    context needs no more) fit.
    """
    cache = engine.cache
    per_sequence = pages_per_sequence(cache.tokens, context)
    if cache.pages is not None:
        return min(cache.pages, engine.slots * per_sequence)
    size = page_bytes(config, cache.tokens, dtype, engine.mesh.tensor, platform)
    space = room()
    fit = space // size
    if fit < min(2, per_sequence):
        raise ConfigError(
            f"memory_fraction {cache.memory_fraction} is {space / 2**20:.1f} MiB and holds {fit} pages of "
            f"{size / 2**20:.2f} MiB ({cache.tokens} tokens); expected {min(2, per_sequence)} or more: free memory, "
            "raise cache.memory_fraction or lower cache.page_size"
        )
    return min(_steady(fit), engine.slots * per_sequence)


def _steady(pages: int) -> int:
    """`pages` rounded down to four binary digits, 12 % at most: the pool's size is in every executable's shape, and a
    little more or less memory at the next start must not mean that the compilation cache knows none of them.
    """
    return pages - pages % max(1, 2 ** (pages.bit_length() - 4))


def make_pages(config: ModelConfig, pages: int, page_size: int, dtype: Any, mesh: Mesh) -> tuple[Pages, ...]:
    """The pool, zeroed, one array per layer, made on the mesh with its sharding.

    An array made elsewhere and moved would be copied, not donated, by the first step.
    """
    shardings = (pages_sharding(config, mesh),) * config.layers
    layers, platform = range(config.layers), platform_of(mesh)

    def make() -> tuple[Pages, ...]:
        return tuple(_layer(config, pages, page_size, dtype, platform) for _ in layers)

    return jax.jit(make, out_shardings=shardings)()


def _layer(config: ModelConfig, pages: int, page_size: int, dtype: Any, platform: str | None) -> Pages:
    lanes, heads = page_lanes(config, dtype, platform), config.cache_shape[1]
    return empty_pages((pages, lanes.planes, heads, page_size, lanes.features), dtype)
