"""How large a block is: queries, heads and pages, small enough that every TPU generation's vector memory holds it.

v4 has 16 MiB of vector memory for a kernel, and v5e gives one as much unasked; the others have or give more. One choice
serves all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arrays import Int8Pages, Pages, Queries
from pallas_kernels.pages import page_shape
from pallas_kernels.tpu_chip import LANES, vmem_bytes

TILE = 16
"""Tokens of a block are a multiple of it: a register holds 16 rows of bfloat16."""
ROWS = 512
"""Queries, times the query heads of a key head, that meet a key at once."""
KEYS, KEYS_FLOAT32 = 512, 256
"""Keys that are met at once."""
HEADS, GROUP = 4, 32
"""Most key heads of a program, and most query heads of each."""
PAGE_NUMBERS = 1 << 18
"""Most numbers of a head's keys in a page. Of twice as many v5e's compiler keeps more than is counted here."""
VMEM_BYTES = 15 << 20
"""Of what `_vmem_bytes` counts: all but one of the 16 MiB. The compiler was not seen to take more than is counted, but
for 0.2 MiB where bfloat16 is multiplied (docs/notes/013)."""


@dataclass(frozen=True)
class Blocks:
    """What one program takes at a time."""

    tokens: int
    heads: int
    """Key heads."""
    group: int
    """Query heads of each key head."""
    query_group: int
    """All query heads of a key head; where `group` is fewer, other programs take the rest."""
    pages: int
    dtype: Any
    """What is multiplied."""

    @property
    def rows(self) -> int:
        """Queries of one key head."""
        return self.tokens * self.group

    @property
    def parts(self) -> int:
        """Strips into which the rows of one head are cut; more than one where there is no second head."""
        return 2 if self.heads == 1 and self.group % 2 == 0 else 1

    @property
    def together(self) -> int:
        """Heads whose strips are met together."""
        return 2 if self.heads % 2 == 0 else self.heads

    def first_head(self, unit: jax.Array) -> jax.Array:
        """The first key head of the `unit`th program of a block of queries."""
        return jax.lax.div(unit * (self.heads * self.group), jnp.int32(self.query_group))


def choose_blocks(queries: Queries, pages: Pages) -> Blocks:
    """The largest blocks that fit into VMEM.

    Raises NotImplementedError for page sizes that do not fill whole lanes, for pages of more than PAGE_NUMBERS, and
    where not even the smallest blocks fit.
    """
    *_, b, c = page_shape(pages)
    if b % LANES and LANES % b:
        raise NotImplementedError(f"pages of {b} tokens: the kernel takes divisors and multiples of {LANES}")
    most = PAGE_NUMBERS // (-(-c // LANES) * LANES)
    if b > most:
        raise NotImplementedError(f"pages of {b} tokens: of {c} features at most {most} fit into VMEM")
    for blocks in _largest_first(queries, pages):
        if _vmem_bytes(blocks, queries, pages) <= VMEM_BYTES:
            return blocks
    raise NotImplementedError(f"{TILE} queries of {c} features and pages of {b} tokens do not fit into VMEM")


def _largest_first(queries: Queries, pages: Pages) -> Iterator[Blocks]:
    """As many tokens as may be of fewer and fewer heads, then half as many tokens, and so on."""
    _, tokens, k, g, _ = queries.shape
    group = max(i for i in range(1, min(g, GROUP) + 1) if g % i == 0)
    stored = jax.tree.leaves(pages)[0].dtype
    dtype = jnp.bfloat16 if queries.dtype == jnp.bfloat16 and stored != jnp.float32 else jnp.float32
    keys = KEYS if dtype == jnp.bfloat16 else KEYS_FLOAT32
    blocks = Blocks(0, 0, group, g, max(keys // page_shape(pages)[3], 1), dtype)
    wanted = min(max(ROWS // group // TILE, 1), -(-tokens // TILE))
    while wanted:
        for heads in _heads(k) if group == g else (1,):
            yield replace(blocks, tokens=wanted * TILE, heads=heads)
        wanted //= 2


def _heads(k: int) -> list[int]:
    """Key heads of a program: at least two of them overlap, and an even number of programs feeds two cores."""
    divisors = [i for i in range(1, HEADS + 1) if k % i == 0]
    best = max(divisors, key=lambda heads: (heads > 1, k // heads % 2 == 0, heads))
    return [heads for heads in reversed(divisors) if heads <= best]


def _vmem_bytes(blocks: Blocks, queries: Queries, pages: Pages) -> int:
    """What a program keeps in VMEM: two rooms, the state, two blocks of queries and two of results; and of the strips
    that are met together the queries, the products and, of float32, the pieces of bfloat16 that are multiplied.
    """
    _, planes, k, b, c = page_shape(pages)
    keys, size = blocks.pages * b, jax.tree.leaves(pages)[0].dtype.itemsize
    rooms = 2 * vmem_bytes((planes, blocks.heads, blocks.pages, b, c), size)
    if isinstance(pages, Int8Pages):
        rooms += 2 * vmem_bytes((blocks.pages, planes, k, b), 4)
    state = vmem_bytes((blocks.heads, blocks.rows, 2 * LANES), 4) + vmem_bytes((blocks.heads, blocks.rows, c), 4)
    moving = 4 * blocks.heads * blocks.group * vmem_bytes((blocks.tokens, c), queries.dtype.itemsize)
    strips = blocks.together * blocks.rows
    met = vmem_bytes((strips, c), jnp.dtype(blocks.dtype).itemsize) + vmem_bytes((strips, keys), 4)
    pieces = vmem_bytes((planes, blocks.together, keys, c), 4) if blocks.dtype == jnp.float32 else 0
    return rooms + state + moving + met + pieces
