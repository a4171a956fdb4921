"""Pages on their way from HBM to VMEM: one asynchronous copy a page, into one of two rooms of several pages each.

While a kernel reads one room, the other one fills. A room holds a head's pages one behind the other, so that a head's
keys of all its pages are one matrix [tokens, c] without a copy:

    in HBM    numbers [n, planes, k, b, c]                 scales [n, planes, k, b]
    in VMEM   numbers [2, planes, k, together, b, c]       scales [2, together, planes, k, b]

A kernel whose programs each take some of the heads makes rooms for as many; scales, which are few, come of all heads.

Knows page tables only as a function from a place in the room to a page of the pool, and nothing of attention.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int32

from pallas_kernels.arrays import Int8Pages, Pages, PageTable
from pallas_kernels.pages import page_shape

Ref = Any
"""What Pallas hands to a kernel; it has no public type."""
Number = Int32[Array, ""]
UNROLLED = 16
"""Most pages of a room whose copies are started without a loop."""
TABLE_BYTES = 512 * 1024
"""Of SMEM's 1 MiB, for the page table of one call of a kernel."""


class Rooms(NamedTuple):
    """Two rooms in VMEM, and a semaphore for each that counts the bytes which have arrived there.

    Made by `make_rooms` as scratch shapes; a kernel gets it with a ref in each field.
    """

    numbers: Ref
    scales: Ref | None
    arrived: Ref

    @property
    def planes(self) -> int:
        """2, keys and values, or 1."""
        return self.numbers.shape[1]

    @property
    def heads(self) -> int:
        """Key heads."""
        return self.numbers.shape[2]

    @property
    def together(self) -> int:
        """Pages of a room."""
        return self.numbers.shape[3]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.numbers.shape[4]

    @property
    def tokens(self) -> int:
        """Tokens of a room."""
        return self.together * self.page_size

    def matrix(self, room: Number, plane: int, head: int) -> Array:
        """[tokens, c] of one head, read where it lies."""
        return self.numbers[room, plane, head].reshape(self.tokens, -1)

    def scales_of(self, room: Number, plane: int, head: Number | int) -> Array:
        """[1, tokens] of one head of int8 pages."""
        assert self.scales is not None
        by_page = [self.scales[room, place, plane, pl.ds(head, 1)] for place in range(self.together)]
        return jnp.concatenate(by_page, axis=1)


def rows_at_once(page_table: PageTable) -> list[slice]:
    """Rows whose page tables SMEM holds at once, for a call each. Raises NotImplementedError where one is too large."""
    rows, width = page_table.shape
    at_once = TABLE_BYTES // (4 * width)
    if at_once == 0:
        raise NotImplementedError(f"page table of {width} pages a row: at most {TABLE_BYTES // 4} fit in SMEM")
    return [slice(first, min(first + at_once, rows)) for first in range(0, rows, at_once)]


def in_hbm(pages: Pages) -> Any:
    """Block specs, one for each leaf of `pages`, that leave it in HBM."""
    return [pl.BlockSpec(memory_space=pl.ANY) for _ in jax.tree.leaves(pages)]


def make_rooms(pages: Pages, together: int, heads: int | None = None) -> Rooms:
    """Scratch shapes of two rooms of `together` pages, for all heads or for `heads`."""
    _, planes, k, b, c = page_shape(pages)
    numbers = pltpu.VMEM((2, planes, heads or k, together, b, c), jax.tree.leaves(pages)[0].dtype)
    scales = pltpu.VMEM((2, together, planes, k, b), jnp.float32) if isinstance(pages, Int8Pages) else None
    return Rooms(numbers, scales, pltpu.SemaphoreType.DMA((2,)))


def start(
    pool: list[Ref],
    rooms: Rooms,
    room: Number,
    page_at: Callable[[Number], Number],
    count: Number,
    first_head: Number | int = 0,
) -> None:
    """Begin to fill the first `count` places of a room (at most all) with the pages that `page_at` names.

    pool holds the leaves of the pages, in HBM; the room gets its heads from `first_head` on. Nobody may still read the
    room, and a `wait` must follow.
    """

    def start_page(place: Number) -> None:
        for copy in _copies(pool, rooms, room, place, page_at(place), first_head):
            copy.start()

    _each_place(rooms, count, start_page)


def wait(pool: list[Ref], rooms: Rooms, room: Number, count: Number) -> None:
    """Until the first `count` places of a room (at most all) are filled."""

    def wait_for_page(place: Number) -> None:
        for copy in _copies(pool, rooms, room, place, jnp.int32(0), 0):
            copy.wait()

    _each_place(rooms, count, wait_for_page)


def _each_place(rooms: Rooms, count: Number, act: Callable[[Any], None]) -> None:
    """One behind the other where these are few, each under its own predicate: a loop costs its branch."""
    if rooms.together <= UNROLLED:
        for place in range(rooms.together):
            pl.when(place < count)(lambda place=place: act(place))
    else:
        jax.lax.fori_loop(0, jnp.minimum(count, rooms.together), lambda place, _: act(place), None)


def _copies(
    pool: list[Ref], rooms: Rooms, room: Number, place: Number, page: Number, first_head: Number | int
) -> list[Any]:
    arrived, numbers = rooms.arrived.at[room], pool[0].at[page]
    if rooms.heads < pool[0].shape[2]:
        numbers = numbers.at[:, pl.ds(first_head, rooms.heads)]
    copies = [pltpu.make_async_copy(numbers, rooms.numbers.at[room, :, :, place], arrived)]
    if rooms.scales is not None:
        copies.append(pltpu.make_async_copy(pool[1].at[page], rooms.scales.at[room, place], arrived))
    return copies


def silence_places(rooms: Rooms, room: Number, count: Number) -> None:
    """Zeros for the values of the places from `count` on, where an earlier use of the room may have left a NaN."""

    def silence(place: Number, _: None) -> None:
        values = rooms.numbers.at[room, rooms.planes - 1, :, place]
        values[...] = jnp.zeros(values.shape, values.dtype)

    if rooms.scales is None:
        jax.lax.fori_loop(jnp.minimum(count, rooms.together), rooms.together, silence, None)


def silence_values(rooms: Rooms, room: Number, begin: Number, end: Number) -> None:
    """Zeros for the values of tokens outside begin .. end - 1, in the pages where these lie.

    A weight of 0 does not silence a NaN in a slot that was never written. Tokens count from the room's first. Pages
    wholly outside are left alone: those that did not come are for `silence_places`. int8 numbers are no NaN, and
    silencing their scales is for who multiplies by them.
    """
    size, tile = rooms.page_size, min(rooms.page_size, 32 // rooms.numbers.dtype.itemsize)

    def silence(place: Number, first: Number, stop: Number) -> None:
        def silence_tile(index: Number, _: None) -> None:
            values = rooms.numbers.at[room, rooms.planes - 1, :, place, pl.ds(pl.multiple_of(index * tile, tile), tile)]
            token = place * size + index * tile + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
            values[...] = jnp.where((token >= begin) & (token < end), values[...], jnp.zeros((), values.dtype))

        jax.lax.fori_loop(first, stop, silence_tile, None)

    def inside_a_page(edge: Number) -> Bool[Array, ""]:
        return (edge > 0) & (edge < rooms.tokens) & (jax.lax.rem(edge, size) > 0)

    def place_and_tile(edge: Number) -> tuple[Number, Number]:
        return jax.lax.div(edge, size), jax.lax.div(jax.lax.rem(edge, size), tile)

    if rooms.scales is not None:
        return

    @pl.when(inside_a_page(begin))
    def _() -> None:
        place, last = place_and_tile(begin)
        silence(place, jnp.int32(0), last + 1)

    @pl.when(inside_a_page(end))
    def _() -> None:
        place, first = place_and_tile(end)
        silence(place, first, jnp.int32(size // tile))
