"""What the model asks of the hardware. The engine hands in an implementation; the model never chooses one.

Knows: the meaning of each operation. Implements nothing: `pallas_kernels` holds the forms, `jaxinfer.engine.ops` binds
them.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from jaxinfer.arrays import Keys, Lengths, Pages, PageTable, Positions, Queries, RowInt, Tokens, Values
from jaxinfer.model.quantised import Quantised, Weight

HIGHEST = jax.lax.Precision.HIGHEST
"""Asked of every product of a float32 model off CPU: otherwise a TPU multiplies float32 as bfloat16 and a GPU as TF32.

Where both sides are bfloat16 it costs nothing. Attention in plain XLA makes float32 of both, and asks for it only where
the queries were that (`pallas_kernels.xla_softmax`)."""


class TokenBatch(NamedTuple):
    """The tokens of one step and where their keys and values live.

    Row s holds up to t tokens at `positions[s]` (-1 is padding). Token at position i of row s lives in page
    `page_table[s, i // b]`, at offset i % b. `lengths[s]` counts the keys that row s has once this step's are written;
    0 marks a padding row. Table entries past the length are never read, whatever they say.
    """

    tokens: Tokens
    positions: Positions
    page_table: PageTable
    lengths: Lengths

    def only(self, index: RowInt) -> "TokenBatch":
        """Each row's token at `index` alone, as a row of one token."""
        return self._replace(tokens=pick(self.tokens, index), positions=pick(self.positions, index))


def pick(x: Shaped[Array, "s t *any"], index: RowInt) -> Shaped[Array, "s 1 *any"]:
    """Each row's entry at `index` along the axis of tokens."""
    return jnp.take_along_axis(x, index.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)


@runtime_checkable
class Ops(Protocol):
    """The operations; every method is pure and is traced inside jit."""

    def write(self, pages: Pages, keys: Keys, values: Values | None, batch: TokenBatch) -> Pages:
        """The pool with this step's keys and values stored; padding is dropped. DONATES `pages`.

        values: None for a pool of one plane, whose keys are their own values.
        """
        ...

    def attend(
        self,
        queries: Queries,
        pages: Pages,
        batch: TokenBatch,
        *,
        window: int | None,
        scale: float,
        softcap: float | None,
        sinks: Float32[Array, "k g"] | None = None,
    ) -> Float[Array, "s t k g c"]:
        """Causal attention of each query over its row's pages, which already hold this step's own keys.

        A query at position i sees positions max(0, i - window + 1) .. i. sinks: a logit per query head that takes its
        share of the softmax and adds nothing; neither scaled nor capped. Padding queries return finite numbers that
        nobody reads.
        """
        ...

    def matmul(
        self, x: Float[Array, "..."], weight: Weight, *, axes: int = 1, dtype: Any = None
    ) -> Float[Array, "..."]:
        """Contract the last `axes` axes of both; the result, of `dtype` or x's, has x's other axes, then the weight's.

        Weights are stored output-first, which XLA on CPU reads twice as fast as input-first.
        """
        ...

    def grouped_matmul(
        self, x: Float[Array, "n i"], weight: Float[Array, "e *out i"] | Quantised, sizes: Int32[Array, " e"]
    ) -> Float[Array, "n *out"]:
        """Each row of x times the matrix of its group: the first sizes[0] rows times weight[0], and so on.

        The sizes add up to n.
        """
        ...

    def take(self, table: Float[Array, "v w"] | Quantised, ids: Int32[Array, "*any"]) -> Float[Array, "*any w"]:
        """Rows of a weight by their number, in the model's dtype."""
        ...
