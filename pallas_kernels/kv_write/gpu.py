"""Writing keys and values on a GPU (Mosaic GPU): each new row goes straight into its slot.

A program owns one head of up to `TOKENS` tokens of a row. It brings them into shared memory by one asynchronous copy a
plane (TMA) and sends each on by another, whose place it looks up: nothing of a page is read, and nothing passes through
registers. The scales of int8 pages are single numbers, loaded and stored.

Knows nothing of the order of positions: any token may go anywhere.
"""

from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int8

from pallas_kernels.arrays import Int8Pages, NewKeys, Pages, PageTable, Positions
from pallas_kernels.gpu_chip import COMPILER, require_hopper
from pallas_kernels.pages import page_shape, quantise

TOKENS = 16
"""Most tokens of a program. More would leave a chunk of a short prompt to a few of the GPU's processors."""
COPY_BYTES = 16
"""An asynchronous copy moves whole multiples of this, from and to addresses that are multiples of it."""
COPY_WIDTH = 256
"""Most numbers of a copy along one axis."""


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
    """As the reference; tokens at position -1 are dropped. DONATES pages.

    Raises NotImplementedError where a head is not a whole number of copies, and on a GPU older than Hopper.
    """
    require_hopper(or_newer=True)
    rows, tokens = positions.shape
    planes = [keys] if values is None else [keys, values]
    if isinstance(pages, Int8Pages):
        quantised = [quantise(plane) for plane in planes]
        new, scales = [plane.numbers for plane in quantised], [plane.scales for plane in quantised]
    else:
        new, scales = [plane.astype(pages.dtype) for plane in planes], []
    width = _width_of_copies(new[0])
    pool = [jax.new_ref(leaf, memory_space=plgpu.GMEM) for leaf in jax.tree.leaves(pages)]
    block = gcd(tokens, TOKENS)
    body = partial(_body, page_size=page_shape(pages)[3], planes=len(planes), block=block, width=width)
    write: Any = pl.kernel(
        body,
        out_type=(),
        mesh=plgpu.Mesh(
            grid=(rows, tokens // block, keys.shape[2]), grid_names=("row", "block", "head"), kernel_name="kv_write"
        ),
        compiler_params=COMPILER,
        interpret=interpret,
        name="kv_write",
    )
    write(page_table, positions, *new, *scales, *pool)
    return jax.tree.unflatten(jax.tree.structure(pages), [jax.freeze(leaf) for leaf in pool])


def _width_of_copies(new: Float[Array, "s t k c"] | Int8[Array, "s t k c"]) -> int:
    """The most features that one copy moves of a head, copies alike. Raises NotImplementedError if there is none."""
    c = new.shape[-1]
    for width in range(min(c, COPY_WIDTH), 0, -1):
        if c % width == 0 and width * new.dtype.itemsize % COPY_BYTES == 0:
            return width
    raise NotImplementedError(f"a head takes {c * new.dtype.itemsize} bytes; copies move multiples of {COPY_BYTES}")


def _body(page_table: Any, positions: Any, *refs: Any, page_size: int, planes: int, block: int, width: int) -> None:
    """One head of `block` tokens. refs: each plane's new rows, for int8 their scales, then the pool's leaves."""
    int8 = len(refs) > planes + 1
    new, scales, pool = refs[:planes], refs[planes : 2 * planes] if int8 else (), refs[-2 if int8 else -1 :]
    row, head = lax.axis_index("row"), lax.axis_index("head")
    first = lax.axis_index("block") * block
    pieces = [(plane, pl.ds(part, width)) for plane in range(planes) for part in range(0, new[0].shape[-1], width)]

    def write(rooms: list[Any], here: Any) -> None:
        for (plane, features), room in zip(pieces, rooms, strict=True):
            plgpu.copy_gmem_to_smem(new[plane].at[row, pl.ds(first, block), head, features], room, here)
        plgpu.barrier_wait(here)

        def store(token: Any, _: None) -> None:
            position = positions[row, first + token]

            @pl.when(position >= 0)
            def _() -> None:
                page = page_table[row, lax.div(position, jnp.int32(page_size))]
                slot = lax.rem(position, jnp.int32(page_size))
                for (plane, features), room in zip(pieces, rooms, strict=True):
                    plgpu.copy_smem_to_gmem(room.at[token], pool[0].at[page, plane, head, slot, features])
                for plane in range(planes if int8 else 0):
                    pool[1][page, plane, head, slot] = scales[plane][row, first + token, head]

        lax.fori_loop(0, block, store, None)
        plgpu.wait_smem_to_gmem(0)

    rooms = [plgpu.SMEM((block, width), new[0].dtype) for _ in pieces]  # apart, as each must begin at 128 bytes
    pl.run_scoped(write, rooms, plgpu.Barrier(num_arrivals=len(pieces)))
