"""The model's `Ops`, bound to the kernels of `pallas_kernels`.

Knows: which kernel does what the model asks. Knows nothing of how a kernel does it.
"""

import logging
from collections.abc import Callable, Hashable, Mapping
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int32

from jaxinfer.arrays import Keys, Pages, Queries, Values
from jaxinfer.config import ModelConfig
from jaxinfer.engine import grouped, quantised_products
from jaxinfer.engine.heads import split_attention, split_write
from jaxinfer.engine.lanes import PageLanes, page_lanes
from jaxinfer.engine.sharding import platform_of
from jaxinfer.model.ops import HIGHEST, TokenBatch
from jaxinfer.model.quantised import Quantised, Weight
from pallas_kernels.dispatch import OPERATIONS, Attempt, Choice, Operation, check, choose

_log = logging.getLogger(__name__)

FEW_ROWS = 64
"""Up to here XLA on CPU is faster with the weight as the left operand, measured in float32 on 2 cores of an AVX2 EPYC
over SmolLM2's matrices: 8 rows 42 against 72 ms, 32 rows 86 against 117, 64 rows 131 against 153, 128 rows the same."""


def _flat_matmul(x: Float[Array, "n i"], weight: Float[Array, "o i"], dtype: Any) -> Float[Array, "n o"]:
    """x times weight transposed, on CPU.

    XLA packs the right operand of a product anew at every call: with few rows that must not be the weight. The barrier
    keeps XLA from turning the product around again.
    """
    contract_last = (((1,), (1,)), ((), ()))
    if not 1 < x.shape[0] <= FEW_ROWS:
        return jax.lax.dot_general(x, weight, contract_last, preferred_element_type=dtype)
    product = jax.lax.dot_general(weight, x, contract_last, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(product).T


class Kernel(NamedTuple):
    """What runs for one operation, and why."""

    operation: str
    form: str
    why: str


class _Record:
    """Each form that ran of each operation, with each of the reasons for it, in the order in which they came."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Operation, str, str], None] = {}

    def note(self, operation: Operation, attempt: Attempt) -> None:
        """Keep what ran; say so where it is new."""
        key = operation, attempt.form, attempt.why
        if key not in self._seen:
            self._seen[key] = None
            _log.info("%s: %s, %s", *key)

    def of(self, operation: Operation) -> tuple[tuple[str, str], ...]:
        """Form and reason of all that ran of an operation."""
        return tuple((form, why) for seen, form, why in tuple(self._seen) if seen == operation)


@cache
def _record_of(identity: Hashable) -> _Record:
    """One record for all equal `PagedOps`: jit traces for the first of them alone, and only a trace shows what runs."""
    return _Record()


def shapes_of(tree: Any) -> Hashable:
    """What a trace depends on of a tree of arrays: structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


class PagedOps:
    """Attention over pages, and dense matrices. Hashable by what was chosen, so jit may take it as static.

    forms: operation -> name of a form of `pallas_kernels.dispatch`; one that is not named takes the platform's default.
    mesh: where the pages lie; over several devices each runs the kernels on its own heads. lanes: how keys and values
    lie in them, by `page_lanes`; None: as the model has them. traced_with: all else that the callers' traces depend on;
    those that differ in it know nothing of what ran for the other. Raises ValueError for an operation or a form that
    does not exist.
    """

    def __init__(
        self,
        forms: Mapping[str, str] | None = None,
        *,
        platform: str | None = None,
        mesh: Mesh | None = None,
        lanes: PageLanes | None = None,
        traced_with: Hashable = None,
    ) -> None:
        forms = forms or {}
        check(forms)
        self._platform = platform or jax.default_backend()
        self._choices: dict[Operation, Choice] = {
            name: choose(name, forms.get(name), self._platform) for name in OPERATIONS
        }
        self._mesh = mesh if mesh is not None and mesh.size > 1 else None
        self._lanes = lanes
        if "quant_matmul" in forms and self._split_weights:
            raise ValueError("quant_matmul has no choice where weights lie over several devices; expected none of it")
        self._identity = self._platform, tuple(self._choices.values()), self._mesh, lanes, traced_with
        self._record = _record_of(self._identity)

    @classmethod
    def of_model(
        cls,
        config: ModelConfig,
        held: Any,
        mesh: Mesh,
        forms: Mapping[str, str] | None = None,
        *,
        traced_with: Hashable = None,
    ) -> "PagedOps":
        """The operations of a model on a mesh, whose devices say what platform they are for; pages are of dtype `held`.

        They fit the pages of `jaxinfer.engine.cache.make_pages` on that mesh. The rest is as for the constructor.
        """
        platform = platform_of(mesh)
        lanes = page_lanes(config, held, platform)
        return cls(forms, platform=platform, mesh=mesh, lanes=lanes, traced_with=(config, traced_with))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """What ran of each operation; before a step was traced, what is tried first."""
        reports = {name: self._record.of(name) or ((it.name, it.why),) for name, it in self._choices.items()}
        if self._split_weights:
            reports["quant_matmul"] = (("xla", "the compiler splits products with weights over several devices"),)
        return tuple(Kernel(name, *what) for name, report in reports.items() for what in report)

    @property
    def _split_weights(self) -> bool:
        """Whether products are left to the compiler, which splits them; on CPU it splits our form."""
        return self._mesh is not None and self._platform != "cpu"

    @property
    def why(self) -> str:
        """`kernels` as text, an operation a line."""
        lines: dict[str, list[str]] = {}
        for kernel in self.kernels:
            lines.setdefault(kernel.operation, []).append(f"{kernel.form}, {kernel.why}")
        return "\n".join(f"{operation}: {'; '.join(ran)}" for operation, ran in lines.items())

    def _form(self, operation: Operation) -> Callable[..., Any]:
        """What runs for an operation; each call leaves a note of what ran."""
        return partial(self._run, operation)

    def _run(self, operation: Operation, *args: Any, **kwargs: Any) -> Any:
        attempt = self._choices[operation].attempt(*args, **kwargs)
        self._record.note(operation, attempt)
        return attempt.result

    def write(self, pages: Pages, keys: Keys, values: Values | None, batch: TokenBatch) -> Pages:
        """The pool with this step's keys and values stored. DONATES pages."""
        if self._lanes is not None:
            keys, values = self._lanes.store(keys, values)
        form = self._form("kv_write")
        write = form if self._mesh is None else split_write(form, pages, self._mesh)
        return write(pages, keys, values, batch.page_table, batch.positions)

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
    ) -> Queries:
        """Causal attention of each query over its row's pages."""
        how = {"window": window, "scale": scale, "softcap": softcap}
        if queries.shape[1] > 1:
            form = partial(self._form("paged_prefill_attention"), **how)
            where = batch.page_table, batch.positions, batch.lengths
            return self._mix(form, queries, pages, sinks, *where)
        form = partial(self._form("paged_decode_attention"), **how)
        return self._mix(form, queries[:, 0], pages, sinks, batch.page_table, batch.lengths)[:, None]

    def _mix(self, form: Any, queries: Any, pages: Pages, sinks: Any, *where: Array) -> Any:
        """`form` with the queries as the pages' lanes are, on each device's own heads."""

        def attend(queries: Any, pages: Pages, sinks: Any, *where: Array) -> Any:
            return form(queries, pages, *where, sinks=sinks)

        asked = queries if self._lanes is None else self._lanes.ask(queries)
        run = attend if self._mesh is None else split_attention(attend, pages, asked, self._mesh)
        mixed = run(asked, pages, sinks, *where)
        return mixed if self._lanes is None else self._lanes.answer(mixed, queries.shape[-1])

    def matmul(
        self, x: Float[Array, "..."], weight: Weight, *, axes: int = 1, dtype: Any = None
    ) -> Float[Array, "..."]:
        """Contract the last `axes` axes of both.

        On CPU as one flat matrix product: where a side keeps several axes, XLA transposes the weight first, which costs
        more than the product. Elsewhere the axes stay, so that a weight sharded on an inner one needs no gather.
        """
        if isinstance(weight, Quantised):
            return self._quantised_matmul(x, weight, axes, dtype)
        kept, out = x.shape[:-axes], weight.shape[:-axes]
        if self._platform == "cpu":
            inner = prod(x.shape[-axes:])
            return _flat_matmul(x.reshape(-1, inner), weight.reshape(-1, inner), dtype).reshape(*kept, *out)
        dims = tuple(range(x.ndim - axes, x.ndim)), tuple(range(weight.ndim - axes, weight.ndim))
        return jax.lax.dot_general(x, weight, (dims, ((), ())), HIGHEST, dtype)

    def _quantised_matmul(
        self, x: Float[Array, "..."], weight: Quantised, axes: int, dtype: Any
    ) -> Float[Array, "..."]:
        """By the kernel where it takes the weight as it lies: on CPU, else on one device and over one axis."""
        if self._platform == "cpu" or (axes == 1 and not self._split_weights):
            form = self._form("quant_matmul")
            return quantised_products.matmul(x, weight, axes=axes, dtype=dtype, form=form)
        return quantised_products.matmul_in_all_axes(x, weight, axes=axes, dtype=dtype)

    def grouped_matmul(
        self, x: Float[Array, "n i"], weight: Float[Array, "e *out i"] | Quantised, sizes: Int32[Array, " e"]
    ) -> Float[Array, "n *out"]:
        """Each row of x times the matrix of its group."""
        return grouped.grouped_matmul(x, weight, sizes, self.matmul, self._platform)

    def take(self, table: Float[Array, "v w"] | Quantised, ids: Int32[Array, "*any"]) -> Float[Array, "*any w"]:
        """Rows of a table by their number."""
        return quantised_products.take(table, ids) if isinstance(table, Quantised) else table[ids]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PagedOps) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)
