"""The engine's two steps, built for a TPU as the engine builds them, without values.

`jaxinfer.engine.runner` builds the same program for the devices that it has.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from published import PUBLISHED

from aot.chips import generation
from aot.compiling import Program, compile_lowered, given_name, mesh
from jaxinfer.config import ModelConfig
from jaxinfer.engine import steps
from jaxinfer.engine.batches import Layout
from jaxinfer.engine.cache import page_bytes, pages_per_sequence
from jaxinfer.engine.sharding import TENSOR, param_shardings
from jaxinfer.engine.state import make_state
from jaxinfer.model.families import config_from_hf
from jaxinfer.model.quantised import bytes_of, parts_of, spread_all
from jaxinfer.model.transformer import abstract_params

Kind = Literal["decode", "prefill"]
KINDS: tuple[Kind, ...] = ("decode", "prefill")
DEFAULTS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Serving:
    """What a step is compiled for: `rows` sequences of up to `context` tokens, prefill in chunks of `chunk`.

    The pool holds all of them. dtype: of the model and, unless cache_dtype is given, of the pages.
    """

    rows: int = 16
    context: int = 4_096
    page_size: int = 128
    chunk: int = 512
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    quantize: Literal["int8", "int4"] | None = None

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.rows * pages_per_sequence(self.page_size, self.context)

    @property
    def held(self) -> str:
        """The dtype of the pages."""
        return self.cache_dtype or self.dtype


@dataclass(frozen=True)
class StepJob:
    """A step to compile."""

    model: str
    kind: Kind
    serving: Serving

    def __str__(self) -> str:
        return f"{self.model} {self.kind}"


@dataclass(frozen=True)
class Step:
    """One step compiled: of which model, and over how many devices."""

    config: ModelConfig
    kind: Kind
    tensor: int
    program: Program
    pool: tuple[tuple[int, ...], ...]
    """Shapes of what one device holds of the pool, an array each."""

    @property
    def kernels(self) -> dict[str, int]:
        """How many Pallas calls of each name it makes."""
        return dict(Counter(map(given_name, self.program.calls)))


def config_of(model: str) -> ModelConfig:
    """A model's configuration. Raises ValueError for a model that is not known."""
    if model not in PUBLISHED:
        raise ValueError(f"no model {model!r}; expected one of {', '.join(PUBLISHED)}")
    return config_from_hf(PUBLISHED[model])


def devices_for(config: ModelConfig, serving: Serving, chip: str) -> int:
    """1 where weights and pool leave a tenth of a device's memory free, else 4."""
    weights = sum(bytes_of(part) for leaf in _leaves(config, serving) for part in parts_of(leaf))
    pool = serving.pages * page_bytes(config, serving.page_size, serving.held, platform="tpu")
    return 1 if weights + pool <= 0.9 * generation(chip).device_memory else 4


def _leaves(config: ModelConfig, serving: Serving) -> list[Any]:
    params = abstract_params(config, serving.dtype, serving.quantize)
    return jax.tree.leaves(params, is_leaf=lambda leaf: not isinstance(leaf, dict))


def compile_step(config: ModelConfig, kind: Kind, chip: str, serving: Serving, tensor: int | None = None) -> Step:
    """Compile a step of a model for `tensor` devices of a generation, by default as many as it needs.

    Raises what the compiler raises.
    """
    config = replace(config, context=serving.context)
    tensor = tensor or devices_for(config, serving, chip)
    devices = mesh(chip, tensor, TENSOR)
    step, args, program = build(config, kind, serving, devices)
    compiled = compile_lowered(chip, devices, lambda: step.lower(*args, program=program))
    pool = tuple(leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(args[1].pages))
    return Step(config, kind, tensor, compiled, pool)


def build(
    config: ModelConfig, kind: Kind, serving: Serving, devices: Mesh, forms: Mapping[str, str] = DEFAULTS
) -> tuple[Any, tuple[Any, ...], steps.Program]:
    """A step of the engine, the shapes of its arguments on that mesh, and what is static in it.

    forms: of operations, where it is not to be the platform's default.
    """
    layout = Layout(
        tokens=0 if kind == "decode" else serving.chunk,
        pages=pages_per_sequence(serving.page_size, serving.context),
        slots=serving.rows,
        vocab=config.vocab_size,
    )
    program = steps.Program.build(config, serving.dtype, serving.held, layout, devices, forms)
    params = abstract_params(config, serving.dtype, serving.quantize)
    params = _placed(params, spread_all(params, param_shardings(config, devices)))
    state = _placed(_state(config, serving, devices), program.shardings)
    count = serving.rows if kind == "decode" else 1
    rows = jax.ShapeDtypeStruct((count, layout.width), jnp.int32, sharding=program.whole)
    step = steps.decode_step if kind == "decode" else steps.prefill_step
    return step, (params, state, rows), program


def _state(config: ModelConfig, serving: Serving, devices: Mesh) -> Any:
    return jax.eval_shape(
        lambda: make_state(
            config,
            pages=serving.pages,
            page_size=serving.page_size,
            slots=serving.rows,
            vocab=config.vocab_size,
            dtype=jnp.dtype(serving.held),
            mesh=devices,
        )
    )


def _placed(shapes: Any, shardings: Any) -> Any:
    """Shapes with the shardings of a tree that may end above their leaves."""
    return jax.tree.map(
        lambda sharding, tree: jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        ),
        shardings,
        shapes,
    )
