"""Pages of a few heads on their way from HBM to VMEM: as `tpu_pages`, but for the heads of one program alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32

from pallas_kernels.arrays import Int8Pages, Pages
from pallas_kernels.pages import page_shape
from pallas_kernels.tpu_pages import Ref

Count = Int32[Array, ""]


class Rooms(NamedTuple):
    """The pool in HBM, two rooms in VMEM, and a semaphore of each room that counts the bytes which have arrived."""

    numbers: Ref
    scales: Ref | None
    number_rooms: Ref
    scale_rooms: Ref | None
    arrived: Ref
    first_head: Count

    @property
    def planes(self) -> int:
        """2, keys and values, or 1."""
        return self.number_rooms.shape[1]

    @property
    def heads(self) -> int:
        """Heads of a room."""
        return self.number_rooms.shape[2]

    @property
    def together(self) -> int:
        """Pages of a room."""
        return self.number_rooms.shape[3]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.number_rooms.shape[4]


def scratch(pages: Pages, together: int, heads: int) -> list[Any]:
    """Scratch shapes of two rooms of `together` pages, and their semaphores."""
    _, planes, k, b, c = page_shape(pages)
    dtype = jax.tree.leaves(pages)[0].dtype
    rooms = [pltpu.VMEM((2, planes, heads, together, b, c), dtype)]
    if isinstance(pages, Int8Pages):
        rooms.append(pltpu.VMEM((2, together, planes, k, b), jnp.float32))
    return [*rooms, pltpu.SemaphoreType.DMA((2,))]


def start(rooms: Rooms, room: Count, page_at: Callable[[Any], Count], count: Count) -> None:
    """Begin to fill the first `count` places of a room with the pages that `page_at` names.

    Each start must be met by one `wait` with the same count; nobody may still read the room.
    """

    def one(place: Count, _: None) -> None:
        for copy in _copies(rooms, room, place, page_at(place)):
            copy.start()

    jax.lax.fori_loop(0, jnp.minimum(count, rooms.together), one, None)


def wait(rooms: Rooms, room: Count, count: Count) -> None:
    """Until the first `count` pages of a room have arrived."""

    def one(place: Count, _: None) -> None:
        for copy in _copies(rooms, room, place, jnp.int32(0)):
            copy.wait()

    jax.lax.fori_loop(0, jnp.minimum(count, rooms.together), one, None)


def _copies(rooms: Rooms, room: Count, place: Count, page: Count) -> list[Any]:
    source = rooms.numbers.at[page, :, pl.ds(rooms.first_head, rooms.heads)]
    copies = [pltpu.make_async_copy(source, rooms.number_rooms.at[room, :, :, place], rooms.arrived.at[room])]
    if rooms.scales is not None and rooms.scale_rooms is not None:
        scales = rooms.scale_rooms.at[room, place]
        copies.append(pltpu.make_async_copy(rooms.scales.at[page], scales, rooms.arrived.at[room]))
    return copies


def silence_values(rooms: Rooms, room: Count, begin: Count, end: Count) -> None:
    """Zeros for the values of tokens of a room outside begin .. end - 1, counted from the room's first.

    A weight of 0 does not silence a NaN, and there may be one in a slot that was never written, or in a place that no
    copy has reached since a broken row used it. int8 numbers are no NaN, and their scales are for who multiplies by
    them.
    """
    if rooms.scales is not None:
        return
    size = rooms.page_size

    def one(place: Count, _: None) -> None:
        first = place * size

        @pl.when((first < begin) | (first + size > end))
        def _() -> None:
            values = rooms.number_rooms.at[room, rooms.planes - 1, :, place]
            token = first + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
            seen = (token >= begin) & (token < end)
            values[...] = jnp.where(seen, values[...].astype(jnp.float32), 0.0).astype(values.dtype)

    jax.lax.fori_loop(0, rooms.together, one, None)
