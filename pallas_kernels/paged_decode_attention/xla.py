"""Paged decode attention in plain XLA: one query a row, `ROWS` rows at a time, one page of each a turn.

Rows go in order of length, so that a short one does not wait on a long one.

The numbers were chosen on CPU (2 busy cores, processor time, float32, 30 layers of 3 kv heads of 64). 32 rows x 1,024
keys, 4 at a time: 250 to 284 ms with a slice a page, 367 to 463 ms with one gather; 8 or 2 at a time are no better, and
2 or 4 pages a turn take twice as long.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.arrays import DecodeQueries, Lengths, Pages, PageTable, Sinks
from pallas_kernels.pages import keys_and_values, page_shape
from pallas_kernels.xla_pages import page_owners, read_page, silence
from pallas_kernels.xla_softmax import Softmax, average, beginning, meet, merge, product_precision

ROWS = 4
"""Rows attended together."""


class Rows(NamedTuple):
    """One query each, with what it attends to."""

    queries: Float[Array, "i k g c"]
    page_table: Int32[Array, "i p"]
    lengths: Int32[Array, " i"]


Attend = Callable[[Rows], Float[Array, "i k g c"]]


@partial(jax.jit, static_argnames=("window", "scale", "softcap"))
def paged_decode_attention(
    queries: DecodeQueries,
    pages: Pages,
    page_table: PageTable,
    lengths: Lengths,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Sinks | None = None,
) -> DecodeQueries:
    """As the reference. Jitted, so that a model of many layers traces it once."""
    rows = Rows(queries.astype(jnp.float32) * scale, page_table, lengths)
    precision = product_precision(queries.dtype)

    def attend(some: Rows) -> Float[Array, "i k g c"]:
        return _attend(some, pages, window, softcap, sinks, precision)

    return _by_length(rows, attend).astype(queries.dtype)


def _by_length(rows: Rows, attend: Attend) -> Float[Array, "i k g c"]:
    """`attend` on all rows, those of like length together."""
    count = len(rows.lengths)
    together = min(ROWS, count)
    if count == together:
        return attend(rows)
    pad = -count % together
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))), rows)
    order = jnp.argsort(padded.lengths)
    mixed = _map_blocks(jax.tree.map(lambda x: x[order], padded), together, attend)
    return mixed[jnp.argsort(order)[:count]]


def _map_blocks(rows: Rows, together: int, attend: Attend) -> Float[Array, "i k g c"]:
    """`attend` on `together` rows at a time; their number divides evenly.

    Each result takes the place of its query: a new array would be zeroed and copied in every layer.
    """

    def block(index: Array, done: Array) -> Array:
        some = rows._replace(queries=done)
        some = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * together, together), some)
        return jax.lax.dynamic_update_slice_in_dim(done, attend(some), index * together, axis=0)

    return jax.lax.fori_loop(0, len(rows.lengths) // together, block, rows.queries)


def _attend(
    rows: Rows,
    pages: Pages,
    window: int | None,
    softcap: float | None,
    sinks: Sinks | None,
    precision: jax.lax.Precision,
) -> Float[Array, "i k g c"]:
    """Walk over the pages that some query sees, those of all rows in step."""
    page_size = page_shape(pages)[3]
    end = rows.lengths
    begin = jnp.zeros_like(end) if window is None else jnp.maximum(end - window, 0)
    first = begin // page_size
    turns = jnp.max((end + page_size - 1) // page_size - first)

    def turn(index: Array, state: Softmax) -> Softmax:
        page = first + index
        key = page[:, None] * page_size + jnp.arange(page_size)
        seen = (key >= begin[:, None]) & (key < end[:, None])
        owners = page_owners(rows.page_table, page[:, None], (page * page_size < end)[:, None])[:, 0]

        def read(which: int) -> Float[Array, "i k b c"]:
            return jnp.concatenate([read_page(pages, owner, which) for owner in owners])

        keys, values = keys_and_values(pages, read)
        met = meet(rows.queries, keys, silence(values, seen), seen[:, None, None], softcap, precision)
        return merge(state, met)

    return average(jax.lax.fori_loop(0, turns, turn, beginning(rows.queries, sinks)))
