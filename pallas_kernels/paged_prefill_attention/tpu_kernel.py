"""What a program of paged prefill attention does: fetch pages ahead, meet their keys, keep a running softmax.

The queries of one key head are the rows of a matrix: the block's tokens for its first query head, then for the second.
Peaks and totals are kept in each of 128 lanes, so that no register is spread at each use; a total's lanes add up to it.
Products of a query and a key stay unscaled: the scale is multiplied in with log2(e), inside the exponential.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.paged_prefill_attention import tpu_rooms
from pallas_kernels.paged_prefill_attention.tpu_blocks import LANES, Blocks
from pallas_kernels.paged_prefill_attention.tpu_rooms import Rooms
from pallas_kernels.tpu_pages import Ref

LOG2_E = 1.4426950408889634
LOWEST = -0.5 * float(jnp.finfo(jnp.float32).max)
"""Stands for minus infinity; the difference of two such is 0 and not NaN."""

Count = Int32[Array, ""]


@dataclass(frozen=True)
class Scores:
    """What becomes of the product of a query and a key."""

    scale: float
    softcap: float | None
    window: int | None

    @property
    def exponent(self) -> float:
        """Times a capped product, it is the exponent of 2."""
        return LOG2_E * (self.scale if self.softcap is None else 1.0)

    def cap(self, products: Float32[Array, "x y"]) -> Float32[Array, "x y"]:
        """Unscaled as they came, or capped and scaled."""
        if self.softcap is None:
            return products
        return self.softcap * jnp.tanh(products * (self.scale / self.softcap))


class Span(NamedTuple):
    """What the queries of one program see: keys `low` to `end` - 1, in `pages` pages of the row from `page` on."""

    row: Count
    begin: Count
    """Position of the first query."""
    low: Count
    end: Count
    page: Count
    pages: Count


class State(NamedTuple):
    """The softmax so far, of each head's rows, in VMEM; between two programs it is one over nothing."""

    peak: Ref
    total: Ref
    mixed: Ref

    def clear(self, head: Count) -> None:
        """Make it a softmax over nothing."""
        for ref, value in zip(self, (LOWEST, 0.0, 0.0), strict=True):
            ref[head] = jnp.full(ref.shape[1:], value, jnp.float32)


class Program(NamedTuple):
    """One program and where its arrays are."""

    blocks: Blocks
    scores: Scores
    unit: Count
    row: Count
    block: Count
    table: Ref
    start: Ref
    count: Ref
    sinks: Ref | None
    queries: Ref
    rooms: Rooms
    cursor: Ref
    """Which room the program's first pages are in."""
    out: Ref
    state: State


def attend(*refs: Ref, blocks: Blocks, scores: Scores, sinks: bool, leaves: int) -> None:
    """One program: a block of queries of one row over all keys that they see."""
    program = _open(list(refs), blocks, scores, sinks, leaves)
    first = (program.row == 0) & (program.block == 0)
    some = program.block * blocks.tokens < program.count[program.row]

    @pl.when(first)
    def _() -> None:
        program.cursor[0] = 0
        _each_head(blocks, program.state.clear)
        there = _next_span(program, jnp.int32(0))
        _fetch(program, jnp.int32(0), there, jnp.int32(0))

    @pl.when(some)
    def _() -> None:
        _walk(program)
        _each_head(blocks, lambda head: _write(program, head))
        _silence_padding(program)

    @pl.when(jnp.logical_not(some))
    def _() -> None:
        program.out[...] = jnp.zeros_like(program.out)


def _open(refs: list[Ref], blocks: Blocks, scores: Scores, sinks: bool, leaves: int) -> Program:
    """Tell the refs apart."""
    table, start, count = (refs.pop(0) for _ in range(3))
    sink = refs.pop(0) if sinks else None
    queries = refs.pop(0)
    pools = [refs.pop(0) for _ in range(leaves)]
    out = refs.pop(0)
    buffers = [refs.pop(0) for _ in range(leaves)]
    arrived, cursor, *state = refs
    unit, row, block = (pl.program_id(axis) for axis in range(3))
    scales = (pools[1], buffers[1]) if leaves == 2 else (None, None)
    rooms = Rooms(pools[0], scales[0], buffers[0], scales[1], arrived, blocks.first_head(unit))
    softmax = State(*state)
    return Program(blocks, scores, unit, row, block, table, start, count, sink, queries, rooms, cursor, out, softmax)


def _each_head(blocks: Blocks, do: Callable[[Count], None]) -> None:
    jax.lax.fori_loop(0, blocks.heads, lambda head, _: do(head), None)


def _span(program: Program, row: Count, block: Count) -> Span:
    """What a program of the same unit sees; it must have queries."""
    tokens, size, window = program.blocks.tokens, program.rooms.page_size, program.scores.window
    begin = program.start[row] + block * tokens
    end = program.start[row] + jnp.minimum(program.count[row], (block + 1) * tokens)
    low = jnp.int32(0) if window is None else jnp.maximum(begin - window + 1, 0)
    page = _whole(low, size)
    return Span(row, begin, low, end, page, _whole(end + size - 1, size) - page)


def _next_span(program: Program, row: Count) -> Span:
    """What the first program of a row sees, of the first row from `row` on that has queries; no pages if none has."""
    rows = pl.num_programs(1)

    def is_empty(row: Count) -> Bool[Array, ""]:
        return (row < rows) & (program.count[jnp.minimum(row, rows - 1)] == 0)

    row = jax.lax.while_loop(is_empty, lambda row: row + 1, row)
    there = _span(program, jnp.minimum(row, rows - 1), jnp.int32(0))
    return there._replace(pages=jnp.where(row < rows, there.pages, 0))


def _whole(number: Count, by: int) -> Count:
    """How many times `by` goes into a number of at least 0; `//` asks for its sign, which takes a chip to know."""
    return jax.lax.div(number, jnp.int32(by))


def _fetch(program: Program, room: Count, there: Span, done: Count) -> None:
    """Begin to fill a room with a span's pages from the `done`th on, as many as there are or fit."""
    width = program.table.shape[0] // program.start.shape[0]
    at = there.row * width + there.page + done
    tpu_rooms.start(program.rooms, room, lambda place: program.table[at + place], there.pages - done)


def _walk(program: Program) -> None:
    """Over the pages that the program sees, and at last begin to fetch what the next program sees first."""
    blocks, rooms = program.blocks, program.rooms
    here = _span(program, program.row, program.block)
    more = (program.block + 1) * blocks.tokens < program.count[program.row]
    next_row = _next_span(program, program.row + 1)
    next_block = _span(program, program.row, program.block + 1)
    then = Span(*(jnp.where(more, one, other) for one, other in zip(next_block, next_row, strict=True)))
    turns = _whole(here.pages + blocks.pages - 1, blocks.pages)
    first_room = program.cursor[0]

    def turn(index: Count, _: None) -> None:
        room, done = (first_room + index) & 1, index * blocks.pages
        last = index + 1 == turns
        there = Span(*(jnp.where(last, one, other) for one, other in zip(then, here, strict=True)))
        _fetch(program, 1 - room, there, jnp.where(last, 0, done + blocks.pages))
        tpu_rooms.wait(rooms, room, here.pages - done)
        key = (here.page + done) * rooms.page_size
        tpu_rooms.silence_values(rooms, room, here.low - key, here.end - key)
        _meet(program, here, room, key)

    jax.lax.fori_loop(0, turns, turn, None)
    program.cursor[0] = (first_room + turns) & 1


def _meet(program: Program, here: Span, room: Count, first_key: Count) -> None:
    """Add a room's keys to the softmax; masked only where the diagonal, the window or the row's end cuts through."""
    keys = program.blocks.pages * program.rooms.page_size
    whole = first_key + keys <= here.begin + 1
    if program.scores.window is not None:
        whole &= first_key >= here.end - program.scores.window

    @pl.when(whole)
    def _() -> None:
        _meet_heads(program, here, room, first_key, None)

    @pl.when(jnp.logical_not(whole))
    def _() -> None:
        _meet_heads(program, here, room, first_key, _seen(program, here, first_key, keys))


def _seen(program: Program, here: Span, first_key: Count, keys: int) -> Bool[Array, "1 tokens keys"]:
    """Which of a room's keys each token sees."""
    shape = (1, program.blocks.tokens, keys)
    position = here.begin + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    key = first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 2)
    seen = key <= jnp.minimum(position, here.end - 1)
    return seen if program.scores.window is None else seen & (key > position - program.scores.window)


def _meet_heads(
    program: Program, here: Span, room: Count, first_key: Count, seen: Bool[Array, "1 tokens keys"] | None
) -> None:
    """Two heads at a time, where there are two: one's products are computed during the other's exponentials."""
    together = 2 if program.blocks.heads % 2 == 0 else 1

    def some(index: Count, _: None) -> None:
        heads = [index * together + i for i in range(together)]
        products = [_multiply(program, room, head) for head in heads]
        for head, product in zip(heads, products, strict=True):
            _fold(program, here, room, first_key, head, product, seen)

    jax.lax.fori_loop(0, program.blocks.heads // together, some, None)


def _multiply(program: Program, room: Count, head: Count) -> Float32[Array, "rows keys"]:
    """Each query times each key."""
    keys = _matrix(program, room, head, 0)
    parts = [program.queries[:, _lanes(program, head, query)] for query in range(program.blocks.group)]
    queries = jnp.concatenate(parts, axis=0).astype(program.blocks.dtype)
    products = _dot(queries, keys, 1)
    return products if program.rooms.scales is None else products * _scales(program, room, head, 0)


def _fold(
    program: Program,
    here: Span,
    room: Count,
    first_key: Count,
    head: Count,
    products: Float32[Array, "rows keys"],
    seen: Bool[Array, "1 tokens keys"] | None,
) -> None:
    """Add keys to the softmax of a head's rows. A row that sees none of them averages anything, at peak LOWEST."""
    blocks, state, last = program.blocks, program.state, program.rooms.planes - 1
    keys = products.shape[1]
    products = program.scores.cap(products)
    if seen is not None:
        cube = products.reshape(blocks.group, blocks.tokens, keys)
        products = jnp.where(seen, cube, LOWEST).reshape(products.shape)
    before = state.peak[head]
    peak = jnp.maximum(before, jnp.max(products, axis=1, keepdims=True))
    fade = jnp.exp2((before - peak) * program.scores.exponent)
    weights = jnp.exp2((products - jnp.tile(peak, (1, keys // LANES))) * program.scores.exponent)
    state.peak[head] = peak
    state.total[head] = state.total[head] * fade + sum(jnp.split(weights, keys // LANES, axis=1))
    if program.rooms.scales is not None:
        key = first_key + jax.lax.broadcasted_iota(jnp.int32, (1, keys), 1)
        scales = jnp.where((key >= here.low) & (key < here.end), _scales(program, room, head, last), 0.0)
        weights = weights * scales
    met = _dot(weights.astype(blocks.dtype), _matrix(program, room, head, last), 0)
    state.mixed[head] = state.mixed[head] * _across(fade, met.shape[1]) + met


def _matrix(program: Program, room: Count, head: Count, plane: int) -> Float[Array, "keys c"]:
    """A head's keys or values of a room."""
    stored = program.rooms.number_rooms[room, plane, head]
    return stored.astype(program.blocks.dtype).reshape(-1, stored.shape[-1])


def _scales(program: Program, room: Count, head: Count, plane: int) -> Float32[Array, "1 keys"]:
    """What a head's int8 keys or values of a room are to be multiplied by."""
    rooms = program.rooms
    assert rooms.scale_rooms is not None
    at = pl.ds(rooms.first_head + head, 1)
    return jnp.concatenate([rooms.scale_rooms[room, place, plane, at] for place in range(rooms.together)], axis=1)


def _dot(one: Float[Array, "x y"], other: Float[Array, "..."], axis: int) -> Float32[Array, "x z"]:
    """A product of matrices that contracts `axis` of the second; float32 in full precision."""
    precision = jax.lax.Precision.HIGHEST if one.dtype == jnp.float32 else None
    contract = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(one, other, contract, precision=precision, preferred_element_type=jnp.float32)


def _lanes(program: Program, head: Count, query: int) -> Any:
    """Where a query head's features are in a block of queries."""
    c = program.state.mixed.shape[-1]
    first = (head * program.blocks.group + query) * (-(-c // LANES) * LANES)
    return pl.ds(pl.multiple_of(first, LANES), c)


def _across(column: Float32[Array, "x 128"], c: int) -> Float32[Array, "x c"]:
    """What stands in each of 128 lanes, in each of `c`."""
    return column[:, :c] if c <= LANES else jnp.tile(column, (1, -(-c // LANES)))[:, :c]


def _write(program: Program, head: Count) -> None:
    """A head's weighted means; then its state begins anew."""
    blocks, state, exponent = program.blocks, program.state, program.scores.exponent
    for query in range(blocks.group):
        at = pl.ds(query * blocks.tokens, blocks.tokens)
        total = jnp.broadcast_to(jnp.sum(state.total[head, at], axis=1, keepdims=True), (blocks.tokens, LANES))
        if program.sinks is not None:  # infinity where the sink leaves less to the keys than float32 can tell from 0
            index = (program.unit * blocks.heads + head) * blocks.group + query
            place = _whole(index, blocks.query_group)
            logit = program.sinks[place, index - place * blocks.query_group]
            total += jnp.exp2(logit * LOG2_E - state.peak[head, at] * exponent)
        mean = state.mixed[head, at]
        program.out[:, _lanes(program, head, query)] = (mean * _across(1 / total, mean.shape[1])).astype(
            program.out.dtype
        )
    state.clear(head)


def _silence_padding(program: Program) -> None:
    """Zeros for the queries that are padding."""
    tokens, real = program.blocks.tokens, program.count[program.row] - program.block * program.blocks.tokens

    @pl.when(real < tokens)
    def _() -> None:
        token = jax.lax.broadcasted_iota(jnp.int32, program.out.shape, 0)
        program.out[...] = jnp.where(token < real, program.out[...].astype(jnp.float32), 0.0).astype(program.out.dtype)
