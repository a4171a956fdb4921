"""Paged prefill attention in plain XLA: a chunk meets its own keys in a triangle, then what lies before it.

The chunk's queries are cut into strips of `QUERIES`. A strip meets the chunk's keys up to its own last one at once, so
that most of what lies past the diagonal is never computed, no loop is needed, and the mask is the same for all chunks.
Then all queries of the chunk walk over the pages before it, `KEYS` keys a turn; a first chunk has none.

The numbers were chosen on CPU (2 cores, float32, 30 layers of 3 kv heads of 64), first chunk of 512 tokens: strips of
128 take 127 ms, of 64 139, of 256 148, all 512 at once 216; a loop over strips of 256 queries and 256 keys took 177.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.arrays import Lengths, Pages, PageTable, Positions, Queries, Sinks
from pallas_kernels.pages import keys_and_values, page_shape
from pallas_kernels.xla_pages import page_owners, read_side_by_side, silence
from pallas_kernels.xla_softmax import Softmax, average, beginning, meet, merge, product_precision

QUERIES = 128
"""Most queries of a strip."""
KEYS = 256
"""Keys before the chunk that its queries meet in one turn, in whole pages."""


class Chunk(NamedTuple):
    """Consecutive queries of each row, scaled, and what the rows hold."""

    queries: Float[Array, "s k g t c"]
    page_table: PageTable
    start: Int32[Array, " s"]
    """Position of the first query."""
    real: Int32[Array, " s"]
    """Queries that are no padding."""


class How(NamedTuple):
    """What is the same for every query: how far it looks back, what caps its scores, how its products are made."""

    window: int | None
    softcap: float | None
    precision: jax.lax.Precision


@partial(jax.jit, static_argnames=("window", "scale", "softcap"))
def paged_prefill_attention(
    queries: Queries,
    pages: Pages,
    page_table: PageTable,
    positions: Positions,
    lengths: Lengths,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Sinks | None = None,
) -> Queries:
    """As the reference, where a row's positions are consecutive, end at its length, and its padding (-1) comes last.

    Jitted, so that a model of many layers traces it once.
    """
    start = jnp.maximum(positions[:, 0], 0)
    count = jnp.minimum(jnp.sum(positions >= 0, axis=1), lengths)
    scaled = queries.astype(jnp.float32) * scale
    chunk = Chunk(jnp.moveaxis(scaled, 1, 3), page_table, start, count)
    how = How(window, softcap, product_precision(queries.dtype))
    state = _meet_own(chunk, pages, how)
    if sinks is not None:
        state = _join_sinks(state, chunk, sinks)
    state = _meet_past(state, chunk, pages, how)
    mixed = jnp.moveaxis(average(state).reshape(chunk.queries.shape), 3, 1)
    return jnp.where(positions[:, :, None, None, None] >= 0, mixed, 0.0).astype(queries.dtype)


def _meet_own(chunk: Chunk, pages: Pages, how: How) -> Softmax:
    """Each query over the chunk's own keys up to its own position."""
    window, softcap, precision = how
    rows, k, g, tokens, c = chunk.queries.shape
    keys, values = _read_own(chunk, pages)
    strips = []
    for begin in range(0, tokens, QUERIES):
        end = min(begin + QUERIES, tokens)
        low = 0 if window is None else max(0, begin - window + 1)
        query, key = jnp.tile(jnp.arange(begin, end), g)[:, None], jnp.arange(low, end)
        seen = key <= query if window is None else (key <= query) & (key > query - window)
        queries = chunk.queries[:, :, :, begin:end].reshape(rows, k, -1, c)
        met = meet(queries, keys[:, :, low:end], values[:, :, low:end], seen[None, None], softcap, precision)
        strips.append(Softmax(*(x.reshape(rows, k, g, end - begin, *x.shape[3:]) for x in met)))
    joined = (jnp.concatenate(parts, axis=3) for parts in zip(*strips, strict=True))
    return Softmax(*(x.reshape(rows, k, g * tokens, *x.shape[4:]) for x in joined))


def _read_own(chunk: Chunk, pages: Pages) -> tuple[Float[Array, "s k t c"], Float[Array, "s k t c"]]:
    """The chunk's own keys and values out of its pages, 0 where a token is padding."""
    page_size, tokens = page_shape(pages)[3], chunk.queries.shape[3]
    page = (chunk.start // page_size)[:, None] + jnp.arange((tokens - 2) // page_size + 2)
    owners = page_owners(chunk.page_table, page, page * page_size < (chunk.start + chunk.real)[:, None])
    written = jnp.arange(tokens) < chunk.real[:, None]

    def read(which: int) -> Float[Array, "s k t c"]:
        room = read_side_by_side(pages, owners, which)
        offsets = zip(room, chunk.start % page_size, strict=True)
        own = jnp.stack([jax.lax.dynamic_slice_in_dim(row, offset, tokens, axis=1) for row, offset in offsets])
        return silence(own, written)

    return keys_and_values(pages, read)


def _join_sinks(state: Softmax, chunk: Chunk, sinks: Sinks) -> Softmax:
    """`state` and, for every query, its head's sink."""
    rows, k, _, tokens, c = chunk.queries.shape
    return merge(state, beginning(chunk.queries.reshape(rows, k, -1, c), jnp.repeat(sinks, tokens, axis=1)))


def _meet_past(state: Softmax, chunk: Chunk, pages: Pages, how: How) -> Softmax:
    """`state` and what each query sees before the chunk, `KEYS` keys a turn."""
    window, softcap, precision = how
    page_size, (rows, k, g, tokens, c) = page_shape(pages)[3], chunk.queries.shape
    together = max(1, KEYS // page_size)
    begin = jnp.zeros_like(chunk.start) if window is None else jnp.maximum(chunk.start - window + 1, 0)
    first = begin // page_size
    turns = (jnp.max((chunk.start + page_size - 1) // page_size - first) + together - 1) // together
    queries = chunk.queries.reshape(rows, k, g * tokens, c)
    position = chunk.start[:, None] + jnp.tile(jnp.arange(tokens), g)

    def turn(index: Array, state: Softmax) -> Softmax:
        page = (first + index * together)[:, None] + jnp.arange(together)
        key = (page[:, :, None] * page_size + jnp.arange(page_size)).reshape(rows, -1)
        past = (key >= begin[:, None]) & (key < chunk.start[:, None])
        owners = page_owners(chunk.page_table, page, page * page_size < chunk.start[:, None])
        keys, values = keys_and_values(pages, lambda which: read_side_by_side(pages, owners, which))
        seen = past[:, None] if window is None else past[:, None] & (key[:, None] > position[:, :, None] - window)
        return merge(state, meet(queries, keys, silence(values, past), seen[:, None], softcap, precision))

    return jax.lax.fori_loop(0, turns, turn, state)
