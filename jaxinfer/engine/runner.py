"""Carries plans out: plan to packed rows, rows to the executable of their bucket, device tokens back to plain data.

Knows: buckets, executables, the state. Decides nothing: which sequence runs where is the scheduler's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.batches import Layout, pack_decodes, pack_prefill
from jaxinfer.engine.cache import cache_dtype, pages_per_sequence, pool_bytes, pool_pages
from jaxinfer.engine.compilation import Progress, compile_all, compile_counter, enable_persistent_cache
from jaxinfer.engine.ops import Kernel, shapes_of
from jaxinfer.engine.sharding import make_mesh, param_shardings, platform_of
from jaxinfer.engine.state import EngineState, make_state
from jaxinfer.engine.steps import Program, decode_step, prefill_step, seat_step
from jaxinfer.errors import ConfigError, EngineFault
from jaxinfer.model.quantised import bytes_per_weight, describe, spread_all
from jaxinfer.plan import DecodeRow, Limits, PrefillChunk, RowParams, Seat, StepPlan, StepTokens
from jaxinfer.request import MAX_LOGPROBS, SampledToken, SamplingParams
from pallas_kernels import dispatch


def engine_dtype(engine: EngineConfig) -> str:
    """The dtype of weights and cache: the configured one, else float32 on CPU and bfloat16 elsewhere."""
    return engine.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def engine_context(config: ModelConfig, engine: EngineConfig) -> int:
    """Most tokens of one sequence. Raises ConfigError where more is asked for than the model was made for."""
    if engine.context is not None and engine.context > config.context:
        raise ConfigError(f"context is {engine.context}; the model was made for {config.context} tokens at most")
    return engine.context or config.context


@dataclass(frozen=True, slots=True)
class Pending:
    """A dispatched plan: per call its output on the device and, per row of it, what to hand back."""

    prefills: tuple[tuple[jax.Array, tuple[RowParams, ...]], ...]
    decodes: tuple[tuple[jax.Array, tuple[RowParams, ...]], ...]


class EngineRunner:
    """A `jaxinfer.scheduler.runner.Runner`; one thread only. `build` it, `warm_up`, then dispatch and fetch."""

    def __init__(self, program: Program, params: Any, state: EngineState, limits: Limits, engine: EngineConfig) -> None:
        self._program = program
        self._params = params
        self._state = state
        self._limits = limits
        self._engine = engine
        self._steps: dict[tuple[str, int], Any] = {}
        self._compiled_before = compile_counter().count
        self._warm_count: int | None = None

    @classmethod
    def build(
        cls, config: ModelConfig, params: Any, engine: EngineConfig, *, vocab_size: int | None = None
    ) -> "EngineRunner":
        """Put the parameters on the mesh and make the page pool.

        `vocab_size`: ids from there up, which pad the model's vocabulary, are never sampled. Raises ConfigError where
        the mesh, the context or the memory cannot serve this model.
        """
        enable_persistent_cache()
        mesh, context, dtype = make_mesh(engine.mesh), engine_context(config, engine), jnp.dtype(engine_dtype(engine))
        config = replace(config, context=context)  # a longrope has other factors where no sequence may grow long
        params = in_bytes(jax.device_put(params, spread_all(params, param_shardings(config, mesh))))
        held = cache_dtype(engine, dtype)
        limits = Limits(
            slots=engine.slots,
            pages=pool_pages(config, engine, context, held, lambda: pool_bytes(mesh, engine.cache.memory_fraction)),
            page_size=engine.cache.tokens,
            context=context,
            chunk=engine.chunk,
            step_tokens=engine.chunk,
            vocab_size=min(vocab_size or config.vocab_size, config.vocab_size),
        )
        layout = Layout(0, pages_per_sequence(limits.page_size, context), limits.slots, limits.vocab_size)
        program = _program(config, engine, params, held, layout, mesh)
        state = make_state(
            config,
            pages=limits.pages,
            page_size=limits.page_size,
            slots=limits.slots,
            vocab=limits.vocab_size,
            dtype=held,
            mesh=mesh,
        )
        return cls(program, params, state, limits, engine)

    @property
    def limits(self) -> Limits:
        """What a plan may ask for; fixed."""
        return self._limits

    @property
    def weights(self) -> str:
        """How the large matrices are kept where they are quantised; "" where all are plain."""
        return describe(self._params)

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight of the large matrices, on average."""
        return bytes_per_weight(self._params)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Which form of each operation the steps run, and why; settled once they are compiled."""
        return self._program.ops.kernels

    @property
    def compilations(self) -> Counter[str]:
        """Executables made in this process since `build`, by phase: warmup (until `warm_up` returned), serving."""
        now, warm = compile_counter().count, self._warm_count
        warm = now if warm is None else warm
        return Counter(warmup=warm - self._compiled_before, serving=now - warm)

    # ---- compiling ---------------------------------------------------------------------------------------------------

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every executable that serving can need, and run each once.

        Raises ConfigError where a kernel that was asked for by name cannot do what this model needs.
        """
        jobs = {("seat", 0): self._lower_seat}
        jobs |= {("prefill", t): lambda t=t: self._lower_prefill(t) for t in self._engine.prefill_buckets}
        jobs |= {("decode", s): lambda s=s: self._lower_decode(s) for s in self._engine.decode_buckets}
        try:
            self._steps = compile_all(jobs, progress)
        except NotImplementedError as refusal:
            if not self._engine.kernels:  # then a form has let down the default, and that is our fault
                raise
            named = ", ".join("=".join(pair) for pair in self._engine.kernels)
            raise ConfigError(
                f"a kernel asked for ({named}) cannot do this: {refusal}; leave it to the default"
            ) from refusal
        for done, (kind, bucket) in enumerate(self._steps, 1):
            self._run_on_nothing(kind, bucket)
            if progress:
                progress("first run", done, len(self._steps))
        self._warm_count = compile_counter().count

    def _run_on_nothing(self, kind: str, bucket: int) -> None:
        """Run an executable for nobody: the first run of each part of it is slow, and no request shall wait for that.

        One row of one token, behind a page of others, in a slot that is not there and in page 0, which nobody owns yet;
        what an owner of the page has not written itself is never read. All other rows are padding, as no two may share
        a page that they write.
        """
        slot, start = self._limits.slots, min(self._limits.page_size, self._limits.context - 1)
        pages = (0,) * (start // self._limits.page_size + 1)
        how = RowParams(SamplingParams(temperature=0.0), seed=0, choice=0, stop_ids=frozenset(), ban_stops=False)
        if kind == "seat":
            self._seat(Seat(slot, (), (), {}))
        elif kind == "decode":
            self._decode([DecodeRow(slot, start, pages, how)], bucket)
        else:
            self._prefill(PrefillChunk(slot, (0,), start, pages, True, how), bucket)
        jax.block_until_ready(self._state)

    def _prefill_program(self, bucket: int) -> Program:
        return replace(self._program, layout=replace(self._program.layout, tokens=bucket))

    def _lower_prefill(self, bucket: int) -> jax.stages.Lowered:
        program = self._prefill_program(bucket)
        return prefill_step.lower(self._params, self._state, self._rows(1, program.layout), program=program)

    def _lower_decode(self, bucket: int) -> jax.stages.Lowered:
        rows = self._rows(bucket, self._program.layout)
        return decode_step.lower(self._params, self._state, rows, program=self._program)

    def _lower_seat(self) -> jax.stages.Lowered:
        nothing = history_row(Seat(0, (), (), {}), self._limits.vocab_size)
        slot, row = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._program.whole),
            (np.array(0, np.int32), nothing),
        )
        return seat_step.lower(self._state, slot, row, program=self._program)

    def _rows(self, rows: int, layout: Layout) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, layout.width), jnp.int32, sharding=self._program.whole)

    # ---- serving -----------------------------------------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> Pending:
        """Start the plan's calls and return. Raises EngineFault where a plan breaks the limits."""
        for seat in plan.seats:
            self._seat(seat)
        outputs = [(self._prefill(chunk), chunk) for chunk in plan.prefills]
        # A chunk that samples nothing is waited for too: the host must not run further ahead than the one step.
        prefills = tuple((output, (chunk.row,) if chunk.samples else ()) for output, chunk in outputs)
        decodes = ((self._decode(plan.decodes), tuple(row.row for row in plan.decodes)),) if plan.decodes else ()
        for output, _ in (*prefills, *decodes):
            output.copy_to_host_async()
        return Pending(prefills, decodes)

    def fetch(self, handle: Pending) -> StepTokens:
        """Wait for all of a plan; its tokens. A token of -1 says that the row's logits were no numbers."""
        return StepTokens(_collect(handle.prefills), _collect(handle.decodes))

    def _step(self, kind: str, bucket: int) -> Any:
        if (kind, bucket) not in self._steps:
            raise EngineFault(f"no {kind} executable of {bucket}; call warm_up before dispatch")
        return self._steps[kind, bucket]

    def _seat(self, seat: Seat) -> None:
        slot = np.array(seat.slot, np.int32)
        self._state = self._step("seat", 0)(self._state, slot, history_row(seat, self._limits.vocab_size))

    def _prefill(self, chunk: PrefillChunk, bucket: int | None = None) -> jax.Array:
        bucket = bucket or _bucket(self._engine.prefill_buckets, len(chunk.tokens), "prompt tokens in a chunk")
        packed = pack_prefill(chunk, self._prefill_program(bucket).layout)
        self._state, output = self._step("prefill", bucket)(self._params, self._state, packed)
        return output

    def _decode(self, rows: Sequence[DecodeRow], bucket: int | None = None) -> jax.Array:
        bucket = bucket or _bucket(self._engine.decode_buckets, len(rows), "rows in a decode call")
        packed = pack_decodes(rows, self._program.layout, bucket)
        self._state, output = self._step("decode", bucket)(self._params, self._state, packed)
        return output


def _program(config: ModelConfig, engine: EngineConfig, params: Any, held: Any, layout: Layout, mesh: Mesh) -> Program:
    dtype, traced_with = jnp.dtype(engine_dtype(engine)), (engine, shapes_of(params))
    check_kernels(engine, platform_of(mesh))
    try:
        return Program.build(config, dtype, held, layout, mesh, dict(engine.kernels), traced_with=traced_with)
    except ValueError as error:
        raise ConfigError(f"kernels: {error}") from None


def check_kernels(engine: EngineConfig, platform: str | None = None) -> None:
    """Raises ConfigError for a kernel that does not exist, or that `platform`, if it is given, cannot run."""
    try:
        dispatch.check(dict(engine.kernels), platform)
    except ValueError as error:
        raise ConfigError(f"kernels: {error}") from None


def in_bytes(params: Any) -> Any:
    """On CPU, int4 as int8: executables that JAX compiles ahead of time there take no int4 arguments, since their
    layout, half a byte each, is not the one that the arrays say they have.
    """
    if jax.default_backend() != "cpu":
        return params
    return jax.tree.map(lambda leaf: leaf.astype(jnp.int8) if leaf.dtype == jnp.int4 else leaf, params)


def _bucket(buckets: Sequence[int], size: int, what: str) -> int:
    fitting = [bucket for bucket in buckets if bucket >= size]
    if not fitting or size < 1:
        raise EngineFault(f"{size} {what}; expected 1 to {max(buckets)}")
    return min(fitting)


def history_row(seat: Seat, vocab: int) -> tuple[NDArray[np.bool_], NDArray[np.int32], NDArray[np.float32]]:
    """A seat's prompt, output and biases as the dense rows [v] of a HistoryRow."""
    in_prompt = np.zeros(vocab, bool)
    in_prompt[list(seat.prompt)] = True
    counts = np.bincount(np.array(seat.output, np.int64), minlength=vocab).astype(np.int32)
    bias = np.zeros(vocab, np.float32)
    bias[list(seat.logit_bias)] = list(seat.logit_bias.values())
    return in_prompt, counts, bias


def _collect(calls: Sequence[tuple[jax.Array, tuple[RowParams, ...]]]) -> tuple[SampledToken, ...]:
    return tuple(
        _token(row, how.params.logprobs)
        for output, rows in calls
        for row, how in zip(np.asarray(output), rows, strict=False)
    )


def _token(row: NDArray[np.int32], wanted: int | None) -> SampledToken:
    token = int(row[0])
    if wanted is None or token < 0:
        return SampledToken(token)
    ids, values = row[2 : 2 + MAX_LOGPROBS], row[2 + MAX_LOGPROBS :].view(np.float32)
    top = tuple((int(i), float(x)) for i, x in zip(ids[:wanted], values, strict=False) if i >= 0)
    return SampledToken(token, float(row[1:2].view(np.float32)[0]), top)
