"""Writing keys and values on a TPU: only the groups of slots that a step touches are read and written, in place.

Knows: a TPU moves whole tiles, so the least that can be written of a page is a group of slots, as many as a tile of its
dtype has rows. One (row, group) is an item. The kernel walks over the items with many copies in flight: it fetches the
groups of later items while those of earlier ones go back. A group that a chunk fills is not read first.

Two items must never touch one group: no two rows may write into one page. So it is in serving: a page that several rows
read is full, and nobody writes it again; a page that is written belongs to one row (`jaxinfer/scheduler/pages.py`).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels import tpu_chip
from pallas_kernels.arrays import NewKeys, Pages, PageTable, Positions
from pallas_kernels.pages import as_stored

_IN_FLIGHT = 4 * 2**20
"""Bytes of groups on their way, both directions: a copy takes about a microsecond to answer, in which a chip moves 1 to
4 MB."""
_MOST_SLOTS = 32
"""Items on their way at most."""
_ROOM = 12 * 2**20
"""Bytes of VMEM that the groups and what is new of them may take."""
_MOST_ITEMS = 32 * 1024
"""Of one call. They take half of SMEM's 1 MiB, four numbers each."""


@partial(jax.jit, static_argnames=("interpret",))
def kv_write(
    pages: Pages,
    keys: NewKeys,
    values: NewKeys | None,
    page_table: PageTable,
    positions: Positions,
    *,
    interpret: Any = False,
) -> Pages:
    """As the reference, where a row's positions are consecutive, its padding (-1) comes last, and no two rows write
    into one page. DONATES pages.

    interpret: handed to `pallas_call`. Jitted, so that a model of many layers traces it once. Raises
    NotImplementedError for a page's head that is too large to keep two in VMEM, for more groups of slots than SMEM
    holds, and for pages of float16.
    """
    tpu_chip.require_dtypes(pages=jax.tree.leaves(pages)[0])
    write = partial(_write, page_table=page_table, positions=positions, interpret=interpret)
    return jax.tree.map(write, pages, as_stored(pages, keys, values))


class _Items(NamedTuple):
    """The groups of slots to write, one entry each: its page, its number in the page, and its fresh slots from first up
    to last (none: equal), counted in the group.
    """

    page: Int32[Array, " items"]
    group: Int32[Array, " items"]
    first: Int32[Array, " items"]
    last: Int32[Array, " items"]


def _write(
    pool: Shaped[Array, "n planes k b *c"],
    new: Shaped[Array, "s t planes k *c"],
    *,
    page_table: PageTable,
    positions: Positions,
    interpret: Any,
) -> Shaped[Array, "n planes k b *c"]:
    """One leaf of the pool with the step's tokens in place."""
    group = _group_size(pool)
    rows, spread = len(positions), (positions.shape[1] - 2) // group + 2  # most groups that a row touches
    if rows * spread > _MOST_ITEMS:
        raise NotImplementedError(f"{rows} rows of {spread} groups of slots: at most {_MOST_ITEMS} groups fit in SMEM")
    items = _items(page_table, positions, spread, group, pool.shape[3])
    return _call(items, _lay_out(new, positions, spread, group), pool, interpret)


def _group_size(pool: Shaped[Array, "n planes k b *c"]) -> int:
    """Slots that are written together: the rows of a tile, or the page where they do not divide it or lie on lanes."""
    tile = 8 * 4 // pool.dtype.itemsize
    return tile if pool.ndim == 5 and pool.shape[3] % tile == 0 else pool.shape[3]


def _items(page_table: PageTable, positions: Positions, spread: int, group: int, page_size: int) -> _Items:
    """`spread` items a row, in the order of their slots."""
    start = jnp.maximum(positions[:, :1], 0)
    end = start + jnp.sum(positions >= 0, axis=1, keepdims=True)
    touched = start // group + jnp.arange(spread)  # groups, counted from the row's position 0
    owner = jnp.clip(touched * group // page_size, 0, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, owner, axis=1)
    first, last = (jnp.clip(at - touched * group, 0, group) for at in (start, end))
    parts = (page, touched % (page_size // group), first, last)
    return _Items(*(part.reshape(-1).astype(jnp.int32) for part in parts))


def _lay_out(
    new: Shaped[Array, "s t planes k *c"], positions: Positions, spread: int, group: int
) -> Shaped[Array, "items planes k r *c"]:
    """What is new in each item: all slots of the group, r = group; of a single token r = 1, which any slot may take."""
    if new.shape[1] == 1:
        return jnp.moveaxis(new, 1, 3)
    offset = jnp.maximum(positions[:, 0], 0) % group

    def shift(row: Shaped[Array, "t planes k *c"], offset: Int32[Array, ""]) -> Shaped[Array, "room planes k *c"]:
        room = jnp.zeros((spread * group, *row.shape[1:]), row.dtype)
        return jax.lax.dynamic_update_slice_in_dim(room, row, offset, axis=0)

    shifted = jax.vmap(shift)(new, offset)
    return jnp.moveaxis(shifted.reshape(-1, group, *new.shape[2:]), 1, 3)


def _call(
    items: _Items, new: Shaped[Array, "items planes k r *c"], pool: Shaped[Array, "n planes k b *c"], interpret: Any
) -> Shaped[Array, "n planes k b *c"]:
    block = (*pool.shape[1:3], _group_size(pool), *pool.shape[4:])
    slots = _slots(block, new.shape[1:], pool.dtype.itemsize)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(items),
        grid=(1,),
        in_specs=[anywhere, anywhere],
        out_specs=anywhere,
        scratch_shapes=[
            pltpu.VMEM((slots, *block), pool.dtype),
            pltpu.VMEM((slots, *new.shape[1:]), pool.dtype),
            pltpu.SemaphoreType.DMA((3, slots)),
        ],
    )
    call = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=spec,
        input_output_aliases={len(items) + 1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="kv_write",
    )
    return call(*items, new, pool)


def _slots(block: tuple[int, ...], new: tuple[int, ...], itemsize: int) -> int:
    """Items on their way: an even number, half of them coming and half going."""
    size, beside = tpu_chip.vmem_bytes(block, itemsize), tpu_chip.vmem_bytes(new, itemsize)
    if 2 * (size + beside) > _ROOM:
        raise NotImplementedError(f"a group of slots takes {size} bytes; at most {_ROOM // 4} can be written at a time")
    return max(2, min(_MOST_SLOTS, _IN_FLIGHT // size, _ROOM // (size + beside)) // 2 * 2)


def _kernel(*refs: Any) -> None:
    """Fetch ahead by half of the slots, so that the other half has time to go back."""
    *items, new, old, pool, room, fresh, sems = refs
    del old  # the same memory as pool
    step = _Step(_Items(*items), new, pool, room, fresh, sems)
    count, slots = new.shape[0], room.shape[0]
    ahead = min(slots // 2, count)

    def turn(i: Any, _: None) -> None:
        @pl.when(i + ahead < count)
        def _fetch() -> None:
            if count > slots:
                step.free(i + ahead - slots)
            step.fetch(i + ahead)

        step.store(i)

    jax.lax.fori_loop(0, ahead, lambda i, _: step.fetch(i), None)
    jax.lax.fori_loop(0, count, turn, None)
    jax.lax.fori_loop(max(0, count - slots), count, lambda i, _: step.free(i), None)


class _Step(NamedTuple):
    """What the kernel works on: `items` in SMEM, `new` and `pool` in HBM, and in VMEM a group and what is new of it for
    each of the slots. sems: of reading a group, of reading what is new, of writing, for each slot.
    """

    items: _Items
    new: Any
    pool: Any
    room: Any
    fresh: Any
    sems: Any

    def fetch(self, i: Any) -> None:
        """Start reading item i into its slot: what is new, and the old group unless nothing of it stays."""
        filled = self._is_filled(i)
        if self._laid_out:

            @pl.when(self._is_touched(i) & filled)
            def _fill() -> None:
                pltpu.make_async_copy(self.new.at[i], self._group(i), self._sem(0, i)).start()

        @pl.when(self._is_touched(i) & jnp.logical_not(filled))
        def _read() -> None:
            self._reading(i).start()
            self._taking(i).start()

    def store(self, i: Any) -> None:
        """Wait for item i, put its fresh slots in, start writing it."""

        @pl.when(self._is_touched(i))
        def _store() -> None:
            self._reading(i).wait()

            @pl.when(jnp.logical_not(self._is_filled(i)))
            def _merge() -> None:
                self._taking(i).wait()
                self._merge(i)

            self._writing(i).start()

    def free(self, i: Any) -> None:
        """Wait until item i is written, if there is one: its slot is another's then."""

        @pl.when((i >= 0) & self._is_touched(i))
        def _free() -> None:
            self._writing(i).wait()

    def _merge(self, i: Any) -> None:
        group = self._group(i)
        slot = jax.lax.broadcasted_iota(jnp.int32, group.shape, 2)
        is_fresh = (slot >= self.items.first[i]) & (slot < self.items.last[i])
        group[...] = jnp.where(is_fresh, self.fresh[self._slot(i)], group[...])

    def _is_touched(self, i: Any) -> Any:
        i = jnp.maximum(i, 0)
        return self.items.first[i] < self.items.last[i]

    @property
    def _laid_out(self) -> bool:
        return self.new.shape[3] == self.room.shape[3]

    def _is_filled(self, i: Any) -> Any:
        return (self.items.last[i] - self.items.first[i] == self.room.shape[3]) & self._laid_out

    def _slot(self, i: Any) -> Any:
        return jax.lax.rem(i, self.room.shape[0])

    def _group(self, i: Any) -> Any:
        return self.room.at[self._slot(i)]

    def _place(self, i: Any) -> Any:
        page, size = self.pool.at[self.items.page[i]], self.room.shape[3]
        if size == page.shape[2]:
            return page
        return page.at[:, :, pl.ds(pl.multiple_of(self.items.group[i] * size, size), size)]

    def _sem(self, kind: int, i: Any) -> Any:
        return self.sems.at[kind, self._slot(i)]

    def _reading(self, i: Any) -> Any:
        return pltpu.make_async_copy(self._place(i), self._group(i), self._sem(0, i))

    def _taking(self, i: Any) -> Any:
        return pltpu.make_async_copy(self.new.at[i], self.fresh.at[self._slot(i)], self._sem(1, i))

    def _writing(self, i: Any) -> Any:
        return pltpu.make_async_copy(self._group(i), self._place(i), self._sem(2, i))
