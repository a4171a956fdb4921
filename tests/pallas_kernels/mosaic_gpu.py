"""What JAX can say of a Mosaic GPU kernel where no GPU is: it interprets it on CPU, and it lowers it."""

from collections.abc import Callable
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu

if hasattr(mosaic_gpu, "InterpretGPUParams"):
    InterpretGPUParams = mosaic_gpu.InterpretGPUParams
else:  # JAX 0.10 has it where nothing is promised
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

INTERPRET = InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


def interpreted(form: Callable[..., Any], *args: Any) -> Any:
    """What `form`, which takes interpret=, gives on CPU, copies and barriers carried out. Raises where threads race."""
    result = jax.block_until_ready(jax.jit(lambda *args: form(*args, interpret=INTERPRET))(*args))
    assert not interpreter.get_races().races_found
    return result


def lowered_for_gpu(form: Callable[..., Any], *args: Any) -> str:
    """The program of `form` for a GPU, as text; its kernels have been laid out and lowered."""
    return jax.export.export(jax.jit(form), platforms=["cuda"])(*args).mlir_module()
