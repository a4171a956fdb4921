"""How long something takes on the device, and what the device does at best."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gpu.jobs import Job, Outcome

LONGEST = 1.5
"""Seconds that one measurement takes at most, unless a single turn takes longer."""
TURNS = 20


def seconds_per_turn(turn: Callable[[Any], Any], start: Any) -> float:
    """Mean seconds of `turn`, which is given what it gave before; dispatched ahead, as serving does. Warm it up."""
    begin = time.perf_counter()
    carried = jax.block_until_ready(turn(start))
    once = time.perf_counter() - begin
    turns = max(1, min(TURNS, int(LONGEST / max(once, 1e-9))))
    begin = time.perf_counter()
    for _ in range(turns):
        carried = turn(carried)
    jax.block_until_ready(carried)
    return (time.perf_counter() - begin) / turns


def speed_jobs(small: bool) -> list[Job]:
    """The device's own rates: of a copy within its memory, read and write counted, and of a bfloat16 product."""
    size, width = (2**24, 256) if small else (2**32, 8192)
    return [
        Job("copy", lambda: Outcome("ok", jax.devices()[0].device_kind, {"bytes_per_s": copy_rate(size)})),
        Job("gemm", lambda: Outcome("ok", figures={"flops_per_s": gemm_rate(width)})),
    ]


def copy_rate(size: int) -> float:
    """Bytes a second, read and written, of copying `size` bytes."""
    copy = jax.jit(lambda x: jax.lax.optimization_barrier(x) + jnp.uint8(1))
    return 2 * size / seconds_per_turn(copy, copy(jnp.zeros((size,), jnp.uint8)))


def gemm_rate(width: int) -> float:
    """Floating-point operations a second of a bfloat16 product of two width x width matrices."""
    fixed = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16) / width**0.5
    multiply = jax.jit(lambda x: (x @ fixed).astype(jnp.bfloat16))
    return 2 * width**3 / seconds_per_turn(multiply, multiply(fixed))
