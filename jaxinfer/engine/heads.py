"""Kernels on a mesh: each device runs on its own heads, since a compiler cannot split a kernel that it did not write.

Knows: which axis of what a kernel takes holds the heads. Knows nothing of what a kernel does.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxinfer.arrays import Pages
from jaxinfer.engine.sharding import TENSOR
from pallas_kernels.pages import page_shape


def split_write(form: Callable[..., Pages], pages: Pages, mesh: Mesh) -> Callable[..., Pages]:
    """`form` of kv_write on a mesh: each device writes the heads that it holds, all of them where heads do not divide.

    Its arguments are those of the form.
    """
    pool = _pool(pages, mesh)
    return _split(form, mesh, (pool, pool, pool, P(), P()), pool)


def split_attention(
    form: Callable[..., jax.Array], pages: Pages, queries: jax.Array, mesh: Mesh
) -> Callable[..., jax.Array]:
    """`form` of paged attention on a mesh: each device attends with the queries of its own heads.

    Where one key serves all heads (multi-head latent attention), the pool is whole on each device and the queries'
    group is split. Called with queries [..., k, g, c], pages, sinks and then all that is the same on every device.
    """
    pool, before = _pool(pages, mesh), (None,) * (queries.ndim - 3)
    if pool != P():
        split = P(TENSOR)
    elif queries.shape[-2] % mesh.shape[TENSOR] == 0:
        split = P(None, TENSOR)
    else:
        split = P()
    own = P(*before, *split)
    return lambda queries, pages, sinks, *same: _split(form, mesh, (own, pool, split, *(P(),) * len(same)), own)(
        queries, pages, sinks, *same
    )


def _pool(pages: Pages, mesh: Mesh) -> P:
    """How heads lie in [_, _, k, ...]: pages, and a step's new keys too."""
    return P(None, None, TENSOR) if page_shape(pages)[2] % mesh.shape[TENSOR] == 0 else P()


def _split(form: Callable[..., Any], mesh: Mesh, specs: tuple[P, ...], out: P) -> Callable[..., Any]:
    # Kernels say nothing of which axes their results vary over, so that is not checked.
    return jax.shard_map(form, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
