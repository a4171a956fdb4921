"""Pages on their way from HBM to VMEM: one asynchronous copy a page, into one of two rooms of several pages each.

While a kernel reads one room, the other one fills. A room holds a head's pages one behind the other, so that a head's
keys of all its pages are one matrix [tokens, c] without a copy:

    in HBM    numbers [n, planes, k, b, c]                 scales [n, planes, k, b]
    in VMEM   numbers [2, planes, k, together, b, c]       scales [2, together, planes, k, b]

Knows page tables only as a function from a place in the room to a page of the pool, and nothing of attention.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32

from pallas_kernels.arrays import Int8Pages, Pages
from pallas_kernels.pages import page_shape

Ref = Any
"""What Pallas hands to a kernel; it has no public type."""
Count = Int32[Array, ""]


class Rooms(NamedTuple):
    """The pool in HBM, two rooms in VMEM, and a semaphore of each room that counts the bytes which have arrived."""

    numbers: Ref
    scales: Ref | None
    number_rooms: Ref
    scale_rooms: Ref | None
    arrived: Ref

    @property
    def planes(self) -> int:
        """2, keys and values, or 1."""
        return self.number_rooms.shape[1]

    @property
    def together(self) -> int:
        """Pages of a room."""
        return self.number_rooms.shape[3]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.number_rooms.shape[4]


def in_hbm(pages: Pages) -> list[pl.BlockSpec]:
    """Where a kernel's operands `jax.tree.leaves(pages)` stay."""
    return [pl.BlockSpec(memory_space=pl.ANY) for _ in jax.tree.leaves(pages)]


def scratch(pages: Pages, together: int) -> list[Any]:
    """Scratch shapes of two rooms of `together` pages, and their semaphores."""
    _, planes, k, b, c = page_shape(pages)
    dtype = jax.tree.leaves(pages)[0].dtype
    rooms = [pltpu.VMEM((2, planes, k, together, b, c), dtype)]
    if isinstance(pages, Int8Pages):
        rooms.append(pltpu.VMEM((2, together, planes, k, b), jnp.float32))
    return [*rooms, pltpu.SemaphoreType.DMA((2,))]


def start(rooms: Rooms, room: Count, page_at: Callable[[int], Count], count: Count) -> None:
    """Begin to fill the first `count` places of a room with the pages that `page_at` names.

    Each start must be met by one `wait` with the same count; nobody may still read the room.
    """
    for place in range(rooms.together):

        @pl.when(place < count)
        def _(place: int = place) -> None:
            for copy in _copies(rooms, room, place, page_at(place)):
                copy.start()


def wait(rooms: Rooms, room: Count, count: Count) -> None:
    """Until the first `count` pages of a room have arrived."""
    for place in range(rooms.together):

        @pl.when(place < count)
        def _(place: int = place) -> None:
            for copy in _copies(rooms, room, place, jnp.int32(0)):
                copy.wait()


def _copies(rooms: Rooms, room: Count, place: int, page: Count) -> list[Any]:
    numbers = rooms.number_rooms.at[room, :, :, place]
    copies = [pltpu.make_async_copy(rooms.numbers.at[page], numbers, rooms.arrived.at[room])]
    if rooms.scales is not None and rooms.scale_rooms is not None:
        scales = rooms.scale_rooms.at[room, place]
        copies.append(pltpu.make_async_copy(rooms.scales.at[page], scales, rooms.arrived.at[room]))
    return copies


def clear_values(rooms: Rooms) -> None:
    """Zeros for the values of both rooms, so that what no copy has reached is finite. int8 is finite as it is."""
    if rooms.scales is None:
        values = rooms.number_rooms.at[:, rooms.planes - 1]
        values[...] = jnp.zeros(values.shape, values.dtype)


def silence_values(rooms: Rooms, room: Count, begin: Count, end: Count) -> None:
    """Zeros for the values of tokens of a room outside begin .. end - 1, in the two pages where these lie.

    A weight of 0 does not silence a NaN in a slot that was never written. Tokens count from the room's first, and the
    pages before begin's and after end's must hold nothing but what `clear_values` or an earlier use left. int8 numbers
    are no NaN, and their scales are for who multiplies by them.
    """
    if rooms.scales is not None:
        return
    size = rooms.page_size
    for place in range(rooms.together):
        first = place * size

        @pl.when(((begin > first) & (begin < first + size)) | ((end > first) & (end < first + size)))
        def _(place: int = place, first: int = first) -> None:
            values = rooms.number_rooms.at[room, rooms.planes - 1, :, place]
            token = first + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
            values[...] = jnp.where((token >= begin) & (token < end), values[...], 0)
