"""The TPU interpreter, at its strictest: it looks for races, fills memory with NaN, and refuses reads out of bounds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")

DTYPES = ("float32", "bfloat16", "int8")
"""Of pages. Real shapes take them in turn: each with each would take minutes."""


def interpreted(form: Callable[..., Any]) -> Callable[..., Any]:
    """The form, interpreted."""
    return partial(form, interpret=INTERPRET)


def run_without_races(run: Callable[..., np.ndarray], form: Callable[..., Any], *args: Any) -> np.ndarray:
    """What `run` gives for the form, interpreted; raises AssertionError where two threads of the chip raced."""
    pltpu.reset_tpu_interpret_mode_state()
    result = run(interpreted(form), *args)
    assert interpreter.races is not None, "nothing was interpreted"
    assert not interpreter.races.races_found
    return result
