"""Times the engine's own steps for a model of Llama 3.1 8B's shape, its weights random, on one device.

A decode step must at least read the weights and each row's keys and values; a prefill step must at least do the
products. What the device does of either a second was measured beforehand, and gives the floor beside each time.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from published import PUBLISHED

from gpu import interpreting
from gpu.clock import seconds_per_turn
from gpu.jobs import Job, Outcome
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.batches import Layout, pack_decodes, pack_prefill
from jaxinfer.engine.sharding import make_mesh
from jaxinfer.engine.state import make_state
from jaxinfer.engine.steps import Program, decode_step, prefill_step
from jaxinfer.model.families import config_from_hf
from jaxinfer.model.transformer import abstract_params
from jaxinfer.plan import DecodeRow, PrefillChunk, RowParams
from jaxinfer.request import SamplingParams

TINY: dict[str, Any] = PUBLISHED["llama3.1-8b"] | {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
PALLAS = ("paged_decode_attention", "paged_prefill_attention", "kv_write")
"""Operations of a bfloat16 model that have a Pallas form."""
THREADS = 6
"""Executables compiled at once."""
HOW = RowParams(SamplingParams(temperature=0.0), seed=0, choice=0, stop_ids=frozenset(), ban_stops=False)


@dataclass(frozen=True)
class Scale:
    """What is measured: a model, decode steps of so many rows at `context`, prefill steps of so many tokens."""

    hf: dict[str, Any]
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    context: int
    page_size: int = 64

    @property
    def row_pages(self) -> int:
        """Pages of a row at `context`."""
        return -(-self.context // self.page_size)

    @property
    def table_width(self) -> int:
        """Pages of the longest sequence."""
        return -(-max(self.context, *self.tokens) // self.page_size)


LARGE = Scale(PUBLISHED["llama3.1-8b"], (1, 16, 64, 256), (512, 2048), 1024)
SMALL = Scale(TINY, (2,), (16,), 100)


class Bench:
    """The model on the device, its page pool, and the executables of its steps."""

    def __init__(self, scale: Scale, forms: dict[str, str]) -> None:
        self.scale = scale
        longest = scale.table_width * scale.page_size
        self.config = replace(config_from_hf(scale.hf), context=longest)
        self._mesh: Mesh = make_mesh(EngineConfig().mesh)
        layout = Layout(0, scale.table_width, max(scale.rows), self.config.vocab_size)
        self.program = Program.build(self.config, "bfloat16", "bfloat16", layout, self._mesh, forms)
        self.params = random_params(self.config)
        self._state: Any = self._make_state()

    def _make_state(self) -> Any:
        return make_state(
            self.config,
            pages=max(max(self.scale.rows) * self.scale.row_pages, self.scale.table_width),
            page_size=self.scale.page_size,
            slots=max(self.scale.rows),
            vocab=self.config.vocab_size,
            dtype=jnp.dtype("bfloat16"),
            mesh=self._mesh,
        )

    def packed(self, kind: str, size: int) -> tuple[Program, Any]:
        """The program of a step and its rows: decode rows at the end of the context, or a whole prompt."""
        program = self.program
        if kind == "decode":
            pages = self.scale.row_pages
            rows = [
                DecodeRow(row, self.scale.context - 1, tuple(range(row * pages, (row + 1) * pages)), HOW)
                for row in range(size)
            ]
            return program, pack_decodes(rows, program.layout, size)
        program = replace(program, layout=replace(program.layout, tokens=size))
        pages = tuple(range(-(-size // self.scale.page_size)))
        return program, pack_prefill(PrefillChunk(0, (1,) * size, 0, pages, True, HOW), program.layout)

    @cache  # noqa: B019  one bench lives as long as its process
    def compiled(self) -> dict[tuple[str, int], Any]:
        """The executables, or what went wrong, by kind and size; compiled at once, so that no timing waits."""
        sizes = [("decode", rows) for rows in self.scale.rows] + [("prefill", t) for t in self.scale.tokens]
        with ThreadPoolExecutor(THREADS) as pool:
            futures = {size: pool.submit(self._compile, *size) for size in sizes}
        return {size: future.exception() or future.result() for size, future in futures.items()}

    def _compile(self, kind: str, size: int) -> Any:
        program, packed = self.packed(kind, size)
        step = decode_step if kind == "decode" else prefill_step
        rows = jax.ShapeDtypeStruct(packed.shape, jnp.int32, sharding=program.whole)
        return step.lower(self.params, self._state, rows, program=program).compile()

    def time(self, kind: str, size: int) -> float:
        """Seconds of a step. Raises what its compilation or its run raised, and ValueError where a token is no token.

        A step that fails takes the state with it, which was donated; the next one gets a new one.
        """
        step = self.compiled()[kind, size]
        if isinstance(step, BaseException):
            raise step
        packed = jax.device_put(self.packed(kind, size)[1], self.program.whole)
        if self._state is None:
            self._state = self._make_state()
        try:
            return self._seconds(step, packed)
        except Exception:
            self._state = None
            raise

    def _seconds(self, step: Any, packed: Any) -> float:
        def turn(_: Any) -> Any:
            self._state, output = step(self.params, self._state, packed)
            return output

        tokens = turn(None)[:, 0]
        if not bool(((tokens >= 0) & (tokens < self.config.vocab_size)).all()):
            raise ValueError(f"tokens {tokens}; expected 0 to {self.config.vocab_size - 1}: the logits were no numbers")
        return seconds_per_turn(turn, None)

    def least(self, kind: str, size: int) -> dict[str, float]:
        """What a step has to do: bytes to read in decode, floating-point operations in prefill."""
        c = self.config
        matrices = sum(leaf.size for leaf in jax.tree.leaves(self.params)) - c.vocab_size * c.width
        if kind == "decode":
            cached = size * self.scale.context * c.layers * 2 * c.kv_heads * c.head_dim
            return {"bytes": 2.0 * (matrices + cached)}
        head = c.vocab_size * c.width  # for one token
        attention = 2 * size * size * c.heads * c.head_dim * c.layers  # two products, half of the square
        return {"flops": 2.0 * ((matrices - head) * size + head) + attention}


def random_params(config: ModelConfig) -> Any:
    """Weights of the model, bfloat16, random and small; norms are 1."""
    shapes = abstract_params(config, "bfloat16")
    leaves, tree = jax.tree.flatten(shapes)
    keys = iter(jax.random.split(jax.random.key(0), len(leaves)))
    return jax.tree.unflatten(tree, [_fill(leaf.shape)(key) for leaf, key in zip(leaves, keys, strict=True)])


@cache
def _fill(shape: tuple[int, ...]) -> Any:
    if len(shape) == 1:
        return lambda key: jnp.ones(shape, jnp.bfloat16)
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16) * (prod(shape[1:]) ** -0.5))


def step_jobs(forms: str, small: bool) -> list[Job]:
    """A job a step, with the "default" forms or the "pallas" ones by name; interpreted where `small`."""
    scale = SMALL if small else LARGE
    sizes = [("decode", rows) for rows in scale.rows] + [("prefill", tokens) for tokens in scale.tokens]
    bench = cache(partial(_bench, scale, forms, small))
    return [Job(f"{kind} {size}", partial(_time, bench, kind, size)) for kind, size in sizes]


def _bench(scale: Scale, forms: str, small: bool) -> Bench:
    if forms == "default":
        return Bench(scale, {})
    operations: Sequence[str] = PALLAS
    if small:
        interpreting.interpret_all()
        operations = PALLAS if interpreting.WHOLE else ("kv_write",)
    return Bench(scale, dict.fromkeys(operations, "gpu"))


def _time(bench: Any, kind: str, size: int) -> Outcome:
    seconds = bench().time(kind, size)
    return Outcome("ok", figures={"ms": 1e3 * seconds, **bench().least(kind, size)})
