"""JAX's interpreter of Mosaic GPU kernels, for a run of the check on CPU."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu

WHOLE = hasattr(mosaic_gpu, "InterpretGPUParams")
"""Before JAX 0.11 the interpreter has gaps, which our kernels only go around where they are told to be interpreted."""
if WHOLE:
    _interpreter: Any = mosaic_gpu
else:  # where nothing is promised
    from jax._src.pallas.mosaic_gpu.interpret import params as _interpreter

INTERPRET = _interpreter.InterpretGPUParams(uninitialized_memory="nan")


def interpret_all() -> None:
    """From here on each Mosaic GPU kernel of this process is interpreted."""
    _interpreter.set_gpu_interpret_mode(INTERPRET)
