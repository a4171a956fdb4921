"""How large a block is: queries, heads and pages, small enough that every TPU generation's vector memory holds it.

The compiler is not told which chip it compiles for until the kernel is written, so that one choice serves all: v4 has
16 MiB of vector memory, the others 64 or 128.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arrays import Pages, Queries
from pallas_kernels.pages import page_shape

LANES = 128
TILE = 16
"""Tokens of a block are a multiple of it: a register holds 16 rows of bfloat16."""
ROWS = 512
"""Queries, times the query heads of a key head, that meet a key at once."""
KEYS, KEYS_FLOAT32 = 512, 256
"""Keys that are met at once."""
HEADS, GROUP = 4, 32
"""Most key heads of a program, and most query heads of each."""


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
    """Raises NotImplementedError for page sizes that do not fill whole lanes."""
    _, tokens, k, g, _ = queries.shape
    b = page_shape(pages)[3]
    if b % LANES and LANES % b:
        raise NotImplementedError(f"pages of {b} tokens: the kernel takes divisors and multiples of {LANES}")
    group = max(i for i in range(1, min(g, GROUP) + 1) if g % i == 0)
    wanted = max(ROWS // group // TILE, 1) * TILE
    stored = jax.tree.leaves(pages)[0].dtype
    dtype = jnp.bfloat16 if queries.dtype == jnp.bfloat16 and stored != jnp.float32 else jnp.float32
    return Blocks(
        tokens=min(wanted, -(-tokens // TILE) * TILE),
        heads=_heads(k) if group == g else 1,
        group=group,
        query_group=g,
        pages=max((KEYS if dtype == jnp.bfloat16 else KEYS_FLOAT32) // b, 1),
        dtype=dtype,
    )


def _heads(k: int) -> int:
    """Key heads of a program: at least two of them overlap, and an even number of programs feeds two cores."""
    divisors = [i for i in range(1, HEADS + 1) if k % i == 0]
    return max(divisors, key=lambda heads: (heads > 1, k // heads % 2 == 0, heads))
