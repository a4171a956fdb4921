"""The model's `Ops`, bound to the kernels of `pallas_kernels`.

Knows: which kernel does what the model asks. Knows nothing of how a kernel does it.
"""

import jax
from jaxtyping import Array, Float

from jaxinfer.arrays import Keys, Pages, Queries, Values
from jaxinfer.model.ops import TokenBatch
from pallas_kernels.dispatch import Choice, choose


class PagedOps:
    """Attention over pages, and dense matrices. Hashable by what was chosen, so jit may take it as static.

    attention and write name a form of `pallas_kernels.dispatch`; None takes the platform's default. `why` says what was
    chosen and for which reason, for logs and `jaxinfer doctor`.
    """

    def __init__(self, attention: str | None = None, write: str | None = None, platform: str | None = None) -> None:
        self._platform = platform or jax.default_backend()
        self._attention = choose("paged_attention", attention, self._platform)
        self._write = choose("kv_write", write, self._platform)

    @property
    def why(self) -> str:
        """What was chosen, one operation a line."""
        return "\n".join(
            f"{choice.operation}: {choice.name}, {choice.why}" for choice in (self._attention, self._write)
        )

    def write(self, pages: Pages, keys: Keys, values: Values, batch: TokenBatch) -> Pages:
        """The pool with this step's keys and values stored. DONATES pages."""
        return self._write(pages, keys, values, batch.page_table, batch.positions)

    def attend(
        self,
        queries: Queries,
        pages: Pages,
        batch: TokenBatch,
        *,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> Queries:
        """Causal attention of each query over its row's pages."""
        return self._attention(
            queries,
            pages,
            batch.page_table,
            batch.positions,
            batch.lengths,
            window=window,
            scale=scale,
            softcap=softcap,
        )

    def matmul(self, x: Float[Array, "... i"], weight: Float[Array, "*out i"]) -> Float[Array, "..."]:
        """Contract the last axis of both.

        On CPU as one flat matrix product: where a side keeps several axes, XLA transposes the weight first, which costs
        more than the product. Elsewhere the axes stay, so that a weight sharded on an inner one needs no gather.
        """
        if self._platform != "cpu":
            return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
        flat = x.reshape(-1, x.shape[-1]), weight.reshape(-1, weight.shape[-1])
        product = jax.lax.dot_general(*flat, (((1,), (1,)), ((), ())))
        return product.reshape(*x.shape[:-1], *weight.shape[:-1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PagedOps) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[str, Choice, Choice]:
        return self._platform, self._attention, self._write
