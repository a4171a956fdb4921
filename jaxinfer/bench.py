"""How fast this machine serves a model, each speed beside its roofline bound.

Knows: what to measure and how. The bound uses what JAX reaches on this machine for a large matmul and a large read, at
the dtype of the weights, not a data sheet; so it says how far the step is from what XLA can do here.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.errors import ConfigError
from jaxinfer.llm import LLM, first_output
from jaxinfer.output import Output
from jaxinfer.request import Request, SamplingParams
from jaxinfer.roofline import Chip, decode_cost, prefill_cost
from jaxinfer.roofline import bound as roofline

READ_BYTES = 256 * 2**20
ENOUGH = 3e-3
"""Seconds that a measurement lasts at least, so that starting it does not count: sizes double until it does."""
TRIES = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One concurrency. Times in milliseconds, rates in tokens/s, intensities in FLOPs a byte.

    prefill_rate: prompt tokens over the time to the last first token. decode_rate: `streams` over the median gap.
    The decode bound is that of the step halfway through the output.
    """

    streams: int
    ttft_p50: float
    ttft_p99: float
    tpot: float
    itl_p50: float
    itl_p99: float
    prefill_rate: float
    prefill_bound: float
    prefill_limit: str
    prefill_intensity: float
    decode_rate: float
    decode_bound: float
    decode_limit: str
    decode_intensity: float


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured, on what, and with which prompt and output lengths (tokens)."""

    model: str
    dtype: str
    device: str
    machine: Chip
    prompt: int
    output: int
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data; the machine's ridge among it."""
        return {**asdict(self), "ridge": self.machine.ridge}


def bench(
    llm: LLM, streams: Sequence[int], *, prompt: int, output: int, rows: Callable[[Sequence[int]], Any] = iter
) -> Report:
    """Measure each number of streams, after one untimed pass of the first. Raises ConfigError where a run cannot fit.

    `rows` wraps the numbers of streams, for a progress bar.
    """
    assembly = llm.assembly
    _check_fits(llm, streams, prompt, output)
    dtype = jnp.dtype(str(assembly.engine.dtype))
    machine = measure_machine(dtype)
    _run(llm, streams[0], prompt, output)
    measured = tuple(_row(llm, machine, dtype.itemsize, count, prompt, output) for count in rows(streams))
    device = jax.devices()[0]
    kept = f"{dtype.name}, weights in {assembly.runner.weights}" if assembly.runner.weights else dtype.name
    return Report(assembly.name, kept, f"{device.platform} {device.device_kind}", machine, prompt, output, measured)


def _check_fits(llm: LLM, streams: Sequence[int], prompt: int, output: int) -> None:
    limits = llm.assembly.runner.limits
    if prompt + output > limits.context:
        raise ConfigError(f"prompt {prompt} + output {output} tokens; the context holds {limits.context}")
    if max(streams) > limits.slots:
        raise ConfigError(f"{max(streams)} streams; the engine has {limits.slots} slots, raise --slots")
    pages = max(streams) * -(-(prompt + output) // limits.page_size)
    if pages > limits.pages:
        raise ConfigError(f"{max(streams)} streams need {pages} pages; the pool has {limits.pages}, raise --pages")


def measure_machine(named: jnp.dtype | str) -> Chip:
    """The FLOP/s of the faster of two matmuls, and the bytes/s of the faster of a read and a copy, in dtype `named`.

    One matmul is square, one has few rows against many weights, as a prefill has: XLA on CPU does it twice as fast.
    """
    dtype = jnp.dtype(named)
    matmul = jax.jit(lambda a, b: jnp.einsum("ik,jk->ij", a, b))
    add = jax.jit(lambda a: a + 1)

    def flops(side: int) -> tuple[float, float]:
        cube, rows, weights = (jnp.ones((n, side), dtype) for n in (side, side // 4, 8 * side))
        square, wide = _best(lambda: matmul(cube, cube)), _best(lambda: matmul(rows, weights))
        return 2 * side**3 / min(square, wide / 2), square  # the wide one does twice the work

    def bandwidth(size: int) -> tuple[float, float]:
        row, matrix = jnp.ones((1, 2_048), dtype), jnp.ones((size // dtype.itemsize // 2_048, 2_048), dtype)
        read, copy = _best(lambda: matmul(row, matrix)), _best(lambda: add(matrix))
        return max(size / read, 2 * size / copy), read

    return Chip("this machine", _grown(flops, 2_048, 16_384), _grown(bandwidth, READ_BYTES, 16 * READ_BYTES), math.nan)


def _grown(measure: Callable[[int], tuple[float, float]], size: int, largest: int) -> float:
    """The rate at the first size, doubled from `size` on, that takes ENOUGH seconds, or at the largest."""
    rate, seconds = measure(size)
    while seconds < ENOUGH and size < largest:
        size *= 2
        rate, seconds = measure(size)
    return rate


def _best(work: Callable[[], jax.Array]) -> float:
    """Seconds of the fastest of TRIES runs, after one that compiles."""
    work().block_until_ready()
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work().block_until_ready()
        times.append(time.perf_counter() - began)
    return min(times)


def _run(llm: LLM, streams: int, prompt: int, output: int) -> list[Output]:
    """All streams at once, from empty prefixes: every prompt is new."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    vocabulary = range(llm.assembly.vocab_size)
    prompts = [random.choices(vocabulary, k=prompt) for _ in range(streams)]
    requests: Iterator[Request] = iter([llm.assembly.request(ids, params) for ids in prompts])
    jobs = ((None, [request]) for request in requests)
    with closing(llm.driver.run_in_order(jobs, window=streams)) as results:
        return [first_output(result) for _, result in results]


def _row(llm: LLM, machine: Chip, dtype_bytes: int, streams: int, prompt: int, output: int) -> Row:
    timings = [made.timing for made in _run(llm, streams, prompt, output)]
    config, engine = llm.assembly.config, llm.assembly.engine
    chunk, held = engine.chunk, 1 if engine.cache.dtype else dtype_bytes
    sizes: dict[str, Any] = {"weight_bytes": llm.assembly.runner.weight_bytes, "kv_dtype_bytes": held}
    ttft = sorted(timing.ttft for timing in timings)
    gaps = sorted(gap for timing in timings for gap in timing.itl)
    prefills = [
        prefill_cost(config, min(chunk, prompt - at), dtype_bytes, at, **sizes) for at in range(0, prompt, chunk)
    ]
    prefill_seconds = streams * sum(roofline(cost, machine).seconds for cost in prefills)
    decode = decode_cost(config, [prompt + output // 2] * streams, dtype_bytes, **sizes)
    return Row(
        streams=streams,
        ttft_p50=1e3 * quantile(ttft, 0.5),
        ttft_p99=1e3 * quantile(ttft, 0.99),
        tpot=1e3 * sum(timing.tpot for timing in timings) / streams,
        itl_p50=1e3 * quantile(gaps, 0.5),
        itl_p99=1e3 * quantile(gaps, 0.99),
        prefill_rate=streams * prompt / ttft[-1],
        prefill_bound=streams * prompt / prefill_seconds,
        prefill_limit=roofline(prefills[0], machine).limit,
        prefill_intensity=prefills[0].intensity,
        decode_rate=streams / quantile(gaps, 0.5),
        decode_bound=streams / roofline(decode, machine).seconds,
        decode_limit=roofline(decode, machine).limit,
        decode_intensity=decode.intensity,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest entry that at least `share` of the entries do not exceed; `ordered` ascends and is not empty."""
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def table(report: Report) -> str:
    """The report for people, as Markdown."""
    machine = report.machine
    head = (
        f"{report.model}, {report.dtype}, {report.device}; prompts of {report.prompt} tokens, "
        f"outputs of {report.output}\n"
        f"machine: {machine.flops / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s, ridge at "
        f"{machine.ridge:.1f} FLOP/B\n"
    )
    columns = (
        "streams",
        "TTFT p50 / p99 ms",
        "TPOT ms",
        "ITL p50 / p99 ms",
        "prefill tok/s",
        "roof",
        "decode tok/s",
        "roof",
    )
    lines = [columns, ("--:",) * len(columns), *map(_cells, report.rows)]
    return head + "\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.streams),
        f"{row.ttft_p50:.0f} / {row.ttft_p99:.0f}",
        f"{row.tpot:.1f}",
        f"{row.itl_p50:.1f} / {row.itl_p99:.1f}",
        f"{row.prefill_rate:.0f}",
        _roof(row.prefill_rate, row.prefill_bound, row.prefill_limit, row.prefill_intensity),
        f"{row.decode_rate:.1f}",
        _roof(row.decode_rate, row.decode_bound, row.decode_limit, row.decode_intensity),
    )


def _roof(rate: float, limit_rate: float, limit: str, intensity: float) -> str:
    return f"{100 * rate / limit_rate:.0f}% of {limit_rate:.0f} ({limit}, {intensity:.1f} FLOP/B)"
