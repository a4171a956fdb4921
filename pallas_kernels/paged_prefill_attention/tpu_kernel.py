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
from jaxtyping import Array, Bool, Float, Float32

from pallas_kernels import tpu_pages
from pallas_kernels.paged_prefill_attention.tpu_blocks import LANES, Blocks
from pallas_kernels.tpu_pages import Number, Ref, Rooms

LOG2_E = 1.4426950408889634
LOWEST = -0.5 * float(jnp.finfo(jnp.float32).max)
"""Stands for minus infinity; the difference of two such is 0 and not NaN."""


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

    row: Number
    begin: Number
    """Position of the first query."""
    low: Number
    end: Number
    page: Number
    pages: Number


class State(NamedTuple):
    """The softmax so far, of each head's rows, in VMEM; between two programs it is one over nothing."""

    peak: Ref
    total: Ref
    mixed: Ref

    def clear(self, head: Number) -> None:
        """Make it a softmax over nothing."""
        for ref, value in zip(self, (LOWEST, 0.0, 0.0), strict=True):
            ref[head] = jnp.full(ref.shape[1:], value, jnp.float32)


class Strip(NamedTuple):
    """Rows of one head: those of its `part`th `size` query heads."""

    head: Number
    part: int
    size: int

    @property
    def queries(self) -> range:
        """Its query heads."""
        return range(self.part * self.size, (self.part + 1) * self.size)


class Program(NamedTuple):
    """One program and where its arrays are."""

    blocks: Blocks
    scores: Scores
    unit: Number
    row: Number
    block: Number
    table: Ref
    start: Ref
    count: Ref
    sinks: Ref | None
    queries: Ref
    pool: list[Ref]
    out: Ref
    rooms: Rooms
    cursor: Ref
    """Which room the program's first pages are in."""
    state: State


def attend(table: Ref, start: Ref, count: Ref, *rest: Any, blocks: Blocks, scores: Scores) -> None:
    """One program: a block of queries of one row over all keys that they see."""
    *sinks, queries, pool, out, rooms, cursor, state = rest
    unit, row, block = (pl.program_id(axis) for axis in range(3))
    sink = sinks[0] if sinks else None
    program = Program(
        blocks, scores, unit, row, block, table, start, count, sink, queries, pool, out, rooms, cursor, state
    )
    first, some = (row == 0) & (block == 0), block * blocks.tokens < count[row]

    @pl.when(first)
    def _() -> None:
        cursor[0] = 0
        _each_head(blocks, state.clear)
        _fetch(program, jnp.int32(0), _next_span(program, jnp.int32(0)), jnp.int32(0))

    @pl.when(some)
    def _() -> None:
        _walk(program)
        _each_head(blocks, lambda head: _write(program, head))
        _silence_padding(program)

    @pl.when(jnp.logical_not(some))
    def _() -> None:
        out[...] = jnp.zeros_like(out)


def _each_head(blocks: Blocks, do: Callable[[Number], None]) -> None:
    def some(index: Number, _: None) -> None:
        for i in range(blocks.together):
            do(index * blocks.together + i)

    jax.lax.fori_loop(0, blocks.heads // blocks.together, some, None)


def _span(program: Program, row: Number, block: Number) -> Span:
    """What a program of the same unit sees; it must have queries."""
    tokens, size, window = program.blocks.tokens, program.rooms.page_size, program.scores.window
    begin = program.start[row] + block * tokens
    end = program.start[row] + jnp.minimum(program.count[row], (block + 1) * tokens)
    low = jnp.int32(0) if window is None else jnp.maximum(begin - window + 1, 0)
    page = _whole(low, size)
    return Span(row, begin, low, end, page, _whole(end + size - 1, size) - page)


def _next_span(program: Program, row: Number) -> Span:
    """What the first program of a row sees, of the first row from `row` on that has queries; no pages if none has."""
    rows = pl.num_programs(1)

    def is_empty(row: Number) -> Bool[Array, ""]:
        return (row < rows) & (program.count[jnp.minimum(row, rows - 1)] == 0)

    row = jax.lax.while_loop(is_empty, lambda row: row + 1, row)
    there = _span(program, jnp.minimum(row, rows - 1), jnp.int32(0))
    return there._replace(pages=jnp.where(row < rows, there.pages, 0))


def _whole(number: Number, by: int) -> Number:
    """How many times `by` goes into a number of at least 0; `//` asks for its sign, which takes a chip to know."""
    return jax.lax.div(number, jnp.int32(by))


def _fetch(program: Program, room: Number, there: Span, done: Number) -> None:
    """Begin to fill a room with a span's pages from the `done`th on, as many as there are or fit."""
    width = program.table.shape[0] // program.start.shape[0]
    at, left = there.row * width + there.page + done, there.pages - done
    first_head = program.blocks.first_head(program.unit)
    tpu_pages.start(program.pool, program.rooms, room, lambda place: program.table[at + place], left, first_head)


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

    def turn(index: Number, _: None) -> None:
        room, done = (first_room + index) & 1, index * blocks.pages
        last = index + 1 == turns
        there = Span(*(jnp.where(last, one, other) for one, other in zip(then, here, strict=True)))
        _fetch(program, 1 - room, there, jnp.where(last, 0, done + blocks.pages))
        tpu_pages.wait(program.pool, rooms, room, here.pages - done)
        key = (here.page + done) * rooms.page_size
        tpu_pages.silence_values(rooms, room, here.low - key, here.end - key)
        tpu_pages.silence_places(rooms, room, here.pages - done)
        _meet(program, here, room, key)

    jax.lax.fori_loop(0, turns, turn, None)
    program.cursor[0] = (first_room + turns) & 1


def _meet(program: Program, here: Span, room: Number, first_key: Number) -> None:
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


def _seen(program: Program, here: Span, first_key: Number, keys: int) -> Bool[Array, "1 tokens keys"]:
    """Which of a room's keys each token sees."""
    shape = (1, program.blocks.tokens, keys)
    position = here.begin + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    key = first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 2)
    seen = key <= jnp.minimum(position, here.end - 1)
    return seen if program.scores.window is None else seen & (key > position - program.scores.window)


def _meet_heads(
    program: Program, here: Span, room: Number, first_key: Number, seen: Bool[Array, "1 tokens keys"] | None
) -> None:
    """Several strips at a time: one's products are computed during another's exponentials."""
    blocks = program.blocks

    def some(index: Number, _: None) -> None:
        heads = [index * blocks.together + i for i in range(blocks.together)]
        strips = [Strip(head, part, blocks.group // blocks.parts) for head in heads for part in range(blocks.parts)]
        products = [_multiply(program, room, strip) for strip in strips]
        for strip, product in zip(strips, products, strict=True):
            _fold(program, here, room, first_key, strip, product, seen)

    jax.lax.fori_loop(0, blocks.heads // blocks.together, some, None)


def _multiply(program: Program, room: Number, strip: Strip) -> Float32[Array, "rows keys"]:
    """Each query times each key."""
    keys = _matrix(program, room, strip.head, 0)
    parts = [program.queries[:, _lanes(program, strip.head, query)] for query in strip.queries]
    queries = jnp.concatenate(parts, axis=0).astype(program.blocks.dtype)
    products = _dot(queries, keys, 1)
    return products if program.rooms.scales is None else products * _scales(program, room, strip.head, 0)


def _fold(
    program: Program,
    here: Span,
    room: Number,
    first_key: Number,
    strip: Strip,
    products: Float32[Array, "rows keys"],
    seen: Bool[Array, "1 tokens keys"] | None,
) -> None:
    """Add keys to the softmax of a strip. A row that sees none of them averages anything, at peak LOWEST."""
    blocks, state, last, head = program.blocks, program.state, program.rooms.planes - 1, strip.head
    rows, keys = pl.ds(strip.part * products.shape[0], products.shape[0]), products.shape[1]
    products = program.scores.cap(products)
    if seen is not None:
        cube = products.reshape(-1, blocks.tokens, keys)
        products = jnp.where(seen, cube, LOWEST).reshape(products.shape)
    before = state.peak[head, rows]
    peak = jnp.maximum(before, jnp.max(products, axis=1, keepdims=True))
    fade = jnp.exp2((before - peak) * program.scores.exponent)
    weights = jnp.exp2((products - jnp.tile(peak, (1, keys // LANES))) * program.scores.exponent)
    state.peak[head, rows] = peak
    state.total[head, rows] = state.total[head, rows] * fade + sum(jnp.split(weights, keys // LANES, axis=1))
    if program.rooms.scales is not None:
        key = first_key + jax.lax.broadcasted_iota(jnp.int32, (1, keys), 1)
        scales = jnp.where((key >= here.low) & (key < here.end), _scales(program, room, head, last), 0.0)
        weights = weights * scales
    met = _dot(weights.astype(blocks.dtype), _matrix(program, room, head, last), 0)
    state.mixed[head, rows] = state.mixed[head, rows] * _across(fade, met.shape[1]) + met


def _matrix(program: Program, room: Number, head: Number, plane: int) -> Float[Array, "keys c"]:
    """A head's keys or values of a room."""
    stored = program.rooms.numbers[room, plane, head]
    return stored.astype(program.blocks.dtype).reshape(-1, stored.shape[-1])


def _scales(program: Program, room: Number, head: Number, plane: int) -> Float32[Array, "1 keys"]:
    """What a head's int8 keys or values of a room are to be multiplied by."""
    return program.rooms.scales_of(room, plane, program.blocks.first_head(program.unit) + head)


def _dot(one: Float[Array, "x y"], other: Float[Array, "..."], axis: int) -> Float32[Array, "x z"]:
    """A product of matrices that contracts `axis` of the second; float32 in full precision."""
    precision = jax.lax.Precision.HIGHEST if one.dtype == jnp.float32 else None
    contract = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(one, other, contract, precision=precision, preferred_element_type=jnp.float32)


def _lanes(program: Program, head: Number, query: int) -> Any:
    """Where a query head's features are in a block of queries."""
    c = program.state.mixed.shape[-1]
    first = (head * program.blocks.group + query) * (-(-c // LANES) * LANES)
    return pl.ds(pl.multiple_of(first, LANES), c)


def _across(column: Float32[Array, "x 128"], c: int) -> Float32[Array, "x c"]:
    """What stands in each of 128 lanes, in each of `c`."""
    return column[:, :c] if c <= LANES else jnp.tile(column, (1, -(-c // LANES)))[:, :c]


def _write(program: Program, head: Number) -> None:
    """A head's weighted means; then its state begins anew."""
    blocks, state = program.blocks, program.state
    for query in range(blocks.group):
        at = pl.ds(query * blocks.tokens, blocks.tokens)
        total = jnp.sum(state.total[head, at], axis=1, keepdims=True)
        if program.sinks is not None:
            index = (program.unit * blocks.heads + head) * blocks.group + query
            place = _whole(index, blocks.query_group)
            logit = program.sinks[place, index - place * blocks.query_group]
            exponent = logit * LOG2_E - state.peak[head, at] * program.scores.exponent
            total = total + jnp.exp2(exponent)  # infinite where nothing is left to the keys: their mean is then 0
        mean = state.mixed[head, at]
        mean = mean * _across(1.0 / jnp.broadcast_to(total, (blocks.tokens, LANES)), mean.shape[1])
        program.out[:, _lanes(program, head, query)] = mean.astype(program.out.dtype)
    state.clear(head)


def _silence_padding(program: Program) -> None:
    """Zeros for the queries that are padding."""
    tokens, real = program.blocks.tokens, program.count[program.row] - program.block * program.blocks.tokens

    @pl.when(real < tokens)
    def _() -> None:
        token = jax.lax.broadcasted_iota(jnp.int32, program.out.shape, 0)
        program.out[...] = jnp.where(token < real, program.out[...].astype(jnp.float32), 0.0).astype(program.out.dtype)
