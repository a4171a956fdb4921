"""Paged attention in plain XLA: strips of queries against a row's pages, with an online softmax (arXiv 2205.14135).

Rows are cut into strips: a whole row in decode, up to `QUERIES` consecutive queries in prefill, where a strip stops at
its own diagonal. Strips are attended `STRIPS` at a time (decode, sorted by length, so that a short row does not wait on
a long one) or one by one (prefill), each walking only over the pages that some query of it sees.

The numbers were chosen on CPU (2 busy cores, processor time, float32, 30 layers of 3 kv heads of 64). Decode of 32 rows
x 1,024 keys, 4 at a time: 250 to 284 ms with a slice a page, 367 to 463 ms with one gather; 8 or 2 at a time are no
better. Keys as the left operand of q.k: 0.7 of the time, because XLA transposes the right one. Prefill of 512 tokens
on two free cores: 227 ms in strips of 256 queries, 273 ms in strips of 128, whose products are too small to share out,
and 259 ms in one strip of 512, half of it past the diagonal.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.arrays import Lengths, Pages, PageTable, Positions, Queries

QUERIES = 256
"""Most queries of a prefill strip: small enough to skip what lies past the diagonal, large enough for fat products."""
STRIPS = 4
"""Decode rows attended together."""
KEYS = 128
"""Keys that a prefill strip meets in one turn of the loop, in whole pages. Decode meets one page of each row a turn."""
LOWEST = float(jnp.finfo(jnp.float32).min)


Attend = Callable[["Strips"], Float[Array, "i q k g c"]]


class Strips(NamedTuple):
    """Consecutive queries of one row each, with what they attend to; i strips of q queries."""

    queries: Float[Array, "i q k g c"]
    page_table: Int32[Array, "i p"]
    positions: Int32[Array, "i q"]
    lengths: Int32[Array, " i"]


class Softmax(NamedTuple):
    """Running softmax of x query heads: the highest score so far, the sum of weights, the weighted sum of values."""

    peak: Float[Array, "i k x"]
    total: Float[Array, "i k x"]
    mixed: Float[Array, "i k x c"]


class Span(NamedTuple):
    """The keys that a strip reads: positions begin .. end - 1."""

    begin: Int32[Array, " i"]
    end: Int32[Array, " i"]


def paged_attention(
    queries: Queries,
    pages: Pages,
    page_table: PageTable,
    positions: Positions,
    lengths: Lengths,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Queries:
    """As the reference."""
    scaled = queries.astype(jnp.float32) * scale
    strips = _cut(Strips(scaled, page_table, positions, lengths))
    decode = positions.shape[1] == 1
    together = min(STRIPS, len(strips.lengths)) if decode else 1
    turn = 1 if decode else max(1, KEYS // pages.shape[3])

    def attend(some: Strips) -> Float[Array, "i q k g c"]:
        return _attend(some, pages, turn=turn, window=window, softcap=softcap)

    mixed = _by_length(strips, together, attend) if decode else _map_blocks(strips, together, attend)
    mixed = mixed.reshape(queries.shape[0], -1, *queries.shape[2:])[:, : queries.shape[1]]
    return mixed.astype(queries.dtype)


def _cut(rows: Strips) -> Strips:
    """Rows into strips of at most QUERIES; the last strip of a row is padded with queries at position -1."""
    tokens = rows.positions.shape[1]
    size = min(tokens, QUERIES)
    pad = -tokens % size
    queries = jnp.pad(rows.queries, ((0, 0), (0, pad), (0, 0), (0, 0), (0, 0)))
    positions = jnp.pad(rows.positions, ((0, 0), (0, pad)), constant_values=-1)
    each = (tokens + pad) // size
    return Strips(
        queries.reshape(-1, size, *queries.shape[2:]),
        jnp.repeat(rows.page_table, each, axis=0),
        positions.reshape(-1, size),
        jnp.repeat(rows.lengths, each),
    )


def _by_length(strips: Strips, together: int, attend: Attend) -> Float[Array, "i q k g c"]:
    """`_map_blocks` over the strips in order of length, results in the order given."""
    count = len(strips.lengths)
    if count == together:
        return attend(strips)
    pad = -count % together
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))), strips)
    order = jnp.argsort(padded.lengths)
    mixed = _map_blocks(jax.tree.map(lambda x: x[order], padded), together, attend)
    return mixed[jnp.argsort(order)[:count]]


def _map_blocks(strips: Strips, together: int, attend: Attend) -> Float[Array, "i q k g c"]:
    """`attend` on `together` strips at a time; their number divides evenly."""
    count = len(strips.lengths)
    if count == together:
        return attend(strips)

    def block(index: Array, done: Array) -> Array:
        some = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * together, together), strips)
        return jax.lax.dynamic_update_slice_in_dim(done, attend(some), index * together, axis=0)

    return jax.lax.fori_loop(0, count // together, block, jnp.zeros_like(strips.queries))


def _span(strips: Strips, window: int | None) -> Span:
    """From the first key that the first query sees to the last that the last one sees; empty where all is padding."""
    real = strips.positions >= 0
    end = jnp.minimum(strips.positions.max(axis=1) + 1, strips.lengths)
    if window is None:
        return Span(jnp.zeros_like(end), end)
    first = jnp.where(real, strips.positions, jnp.iinfo(jnp.int32).max).min(axis=1)
    return Span(jnp.maximum(first - (window - 1), 0), end)


def _gather(
    strips: Strips, pages: Pages, span: Span, first: Int32[Array, " i"], turn: int
) -> tuple[Float[Array, "i k y c"], Float[Array, "i k y c"], Int32[Array, "i y"], Bool[Array, "i y"]]:
    """Keys and values of `turn` pages from page `first` on, their positions, and which of them lie in the span.

    Values outside the span become 0, because a weight of 0 does not silence a NaN in a slot that was never written.
    Keys need no such care: their scores are masked after the product.
    """
    page_size = pages.shape[3]
    page = first[:, None] + jnp.arange(turn)
    listed = jnp.take_along_axis(strips.page_table, jnp.minimum(page, strips.page_table.shape[1] - 1), axis=1)
    owner = jnp.where(page * page_size < span.end[:, None], listed, 0)
    key = (page[:, :, None] * page_size + jnp.arange(page_size)).reshape(page.shape[0], -1)
    readable = (key >= span.begin[:, None]) & (key < span.end[:, None])
    keys, values = (_read(pages, owner, which) for which in (0, 1))
    return keys, jnp.where(readable[:, None, :, None], values, 0.0), key, readable


def _read(pages: Pages, owner: Int32[Array, "i m"], which: int) -> Float[Array, "i k y c"]:
    """Keys (which = 0) or values (1) of the pages that each strip names, side by side under each head, in float32.

    One slice a page, put together, and no gather: XLA on CPU copies a slice in long runs, and a gather one number at a
    time. Page numbers out of range are clamped.
    """
    _, _, k, b, c = pages.shape
    shape = (1, 1, k, b, c)
    slices = [jax.lax.dynamic_slice(pages, (page, which, 0, 0, 0), shape)[0] for page in owner.reshape(-1)]
    stacked = jnp.concatenate(slices).reshape(*owner.shape, k, b, c)
    return jnp.moveaxis(stacked, 1, 2).reshape(owner.shape[0], k, -1, c).astype(jnp.float32)


def _dot_keys(queries: Float[Array, "i k x c"], keys: Float[Array, "i k y c"]) -> Float[Array, "i k x y"]:
    """q.k; the smaller operand goes right, where XLA on CPU transposes it."""
    if queries.shape[2] < keys.shape[2]:
        return jnp.einsum("ikyc,ikxc->ikyx", keys, queries).swapaxes(2, 3)
    return jnp.einsum("ikxc,ikyc->ikxy", queries, keys)


def _fold(state: Softmax, scores: Float[Array, "i k x y"], values: Float[Array, "i k y c"]) -> Softmax:
    """One turn of the online softmax.

    A query that has seen nothing yet carries an average of anything at peak LOWEST; its first real score fades it to 0.
    """
    peak = jnp.maximum(state.peak, scores.max(axis=-1))
    weights = jnp.exp(scores - peak[..., None])
    fade = jnp.exp(state.peak - peak)
    mixed = state.mixed * fade[..., None] + jnp.einsum("ikxy,ikyc->ikxc", weights, values)
    return Softmax(peak, state.total * fade + weights.sum(axis=-1), mixed)


def _attend(
    strips: Strips, pages: Pages, *, turn: int, window: int | None, softcap: float | None
) -> Float[Array, "i q k g c"]:
    """Attention of the strips, `turn` pages of each at a time."""
    i, q, k, g, c = strips.queries.shape
    page_size = pages.shape[3]
    span = _span(strips, window)
    # In whole turns, so that which keys are summed together does not depend on where a chunk starts.
    first = span.begin // (page_size * turn) * turn
    turns = jnp.max((span.end + page_size - 1) // page_size - first + turn - 1) // turn
    queries = jnp.moveaxis(strips.queries, 1, 3).reshape(i, k, g * q, c)
    position = jnp.tile(strips.positions, (1, g))[:, None, :, None]  # [i, 1, x, 1]

    def meet(index: Array, state: Softmax) -> Softmax:
        keys, values, key, readable = _gather(strips, pages, span, first + index * turn, turn)
        scores = _dot_keys(queries, keys)
        scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
        key = key[:, None, None, :]
        seen = (key <= position) & readable[:, None, None, :]
        seen = seen if window is None else seen & (key > position - window)
        return _fold(state, jnp.where(seen, scores, LOWEST), values)

    flat = jnp.zeros((i, k, g * q))
    start = Softmax(flat + LOWEST, flat, jnp.zeros_like(queries))
    _, total, mixed = jax.lax.fori_loop(0, turns, meet, start)
    mixed = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return jnp.moveaxis(mixed.reshape(i, k, g, q, c), 3, 1)
