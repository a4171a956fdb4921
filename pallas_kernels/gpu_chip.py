"""Which GPU a kernel is compiled for, how, and what versions of JAX know of it. Hopper is compute capability 9.0."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

HOPPER = (9, 0)
PROGRAMS = 264
"""Programs that fill a GPU: two for each of the 132 processors (SM) of an H100 or H200."""
COMPILER = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
"""The semantics that infer layouts, in all versions of JAX, whose defaults differ."""
JAX_0_10 = not hasattr(plgpu, "InterpretGPUParams")
"""JAX 0.10 interprets neither a transposed operand of wgmma nor a load with options, and calls the latter otherwise."""


def require_hopper(*, or_newer: bool = False) -> None:
    """Raises NotImplementedError on a GPU that lacks what the kernel is made of; elsewhere there is nothing to ask.

    wgmma is Hopper's alone; asynchronous copies (TMA, cp.async.bulk) came with it and stayed.
    """
    if jax.default_backend() != "gpu":
        return
    has = jax.devices()[0].compute_capability
    version = tuple(int(part) for part in has.split("."))
    if version < HOPPER or (version > HOPPER and not or_newer):
        need = "9.0 or newer" if or_newer else "9.0 (Hopper) alone"
        raise NotImplementedError(f"a GPU of compute capability {has}; the kernel is for {need}")
