"""Quantised products: the reference by hand, and every plain form against it, over real weights and small odd ones."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quant_matmul import reference, xla, xla_cpu
from pallas_kernels.quant_matmul.shapes import SHAPES, Shape

FORMS: dict[str, Callable[..., Any]] = {"xla": xla.quant_matmul, "xla_cpu": xla_cpu.quant_matmul}
SMALL = {
    "by channel": Shape(40, 96),
    "by channel, offset": Shape(40, 96, offset=True),
    "in groups": Shape(40, 96, "int8", 32),
    "in groups of 16, offset": Shape(40, 96, "int8", 16, offset=True),
    "in odd groups": Shape(40, 33, "int8", 11),
    "of an odd axis": Shape(40, 7),
    "int4 by channel": Shape(40, 96, "int4"),
    "int4 in groups": Shape(40, 96, "int4", 32),
    "int4 in groups, offset": Shape(40, 96, "int4", 32, offset=True),
    "int4 in odd groups, offset": Shape(40, 66, "int4", 11, offset=True),
}


def cut(shape: Shape) -> Shape:
    """At most 2 ** 20 values of it, of all of its inputs."""
    return replace(shape, outputs=min(shape.outputs, 2**20 // shape.inputs))


def make_call(shape: Shape, rows: int, seed: int = 0, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """x, values, scale and offset, the last two of bfloat16 numbers, so that they are exact in every dtype."""
    random = np.random.default_rng(seed)
    least, most = (-8, 7) if shape.values == "int4" else (-127, 127)
    values = random.integers(least, most, (shape.outputs, shape.inputs), endpoint=True, dtype=np.int8)
    scale = random.uniform(0.5, 1.0, (shape.outputs, shape.groups)) / most
    offset = random.standard_normal(scale.shape) if shape.offset else None
    x = random.standard_normal((rows, shape.inputs))
    return (
        jnp.asarray(x, jnp.bfloat16).astype(dtype),
        jnp.asarray(values).astype(shape.values),
        jnp.asarray(scale, jnp.bfloat16).astype(dtype),
        None if offset is None else jnp.asarray(offset, jnp.bfloat16).astype(dtype),
    )


def by_hand(x: Any, values: Any, scale: Any, offset: Any) -> np.ndarray:
    """In float64, one group at a time."""
    x, values, scale = (np.asarray(part.astype(jnp.float32), np.float64) for part in (x, values, scale))
    offset = np.zeros_like(scale) if offset is None else np.asarray(offset.astype(jnp.float32), np.float64)
    group, product = values.shape[1] // scale.shape[1], np.zeros((len(x), len(values)))
    for i in range(scale.shape[1]):
        at = slice(i * group, (i + 1) * group)
        product += x[:, at] @ (values[:, at] * scale[:, i, None] + offset[:, i, None]).T
    return product


def assert_near(got: Any, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_is_the_product_with_the_decoded_weight(name: str) -> None:
    call = make_call(SMALL[name], 3)
    assert_near(reference.quant_matmul(*call, dtype=jnp.float32), by_hand(*call), 1e-6)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_equals_the_reference_on_small_shapes(form: str, name: str, rows: int) -> None:
    call = make_call(SMALL[name], rows)
    assert_near(FORMS[form](*call, dtype=jnp.float32), by_hand(*call), 1e-5)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_equals_the_reference_on_real_weights(form: str, name: str) -> None:
    call = make_call(cut(SHAPES[name]), 2)
    assert_near(FORMS[form](*call, dtype=jnp.float32), by_hand(*call), 1e-5)


@pytest.mark.parametrize(("form", "name"), [("xla", "by channel"), ("xla_cpu", "in groups"), ("xla", "in groups")])
def test_bfloat16_is_summed_in_float32_and_returned_as_asked(form: str, name: str) -> None:
    call = make_call(SMALL[name], 3, dtype=jnp.bfloat16)
    got = FORMS[form](*call, dtype=jnp.float32)
    # Elsewhere than on CPU a weight of several groups is rounded to bfloat16.
    assert_near(got, by_hand(*call), 4e-3 if (form, name) == ("xla", "in groups") else 1e-5)
    np.testing.assert_array_equal(FORMS[form](*call, dtype=jnp.bfloat16), got.astype(jnp.bfloat16))


@pytest.mark.parametrize("form", [reference.quant_matmul, *FORMS.values()])
def test_groups_that_do_not_divide_the_inputs_are_named(form: Callable[..., Any]) -> None:
    x, values, scale, _ = make_call(SMALL["in groups"], 2)
    with pytest.raises(ValueError, match="2 groups over 33 inputs"):
        form(x[:, :33], values[:, :33], scale[:, :2], None, dtype=jnp.float32)


@pytest.mark.parametrize("values", ["int8", "int4"])
def test_one_row_on_cpu_makes_no_decoded_weight_in_memory(values: Any) -> None:
    call = make_call(Shape(1_024, 1_024, values, 32, offset=True), 1)
    compiled = xla_cpu.quant_matmul.lower(*call, dtype=jnp.float32).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4 * 1_024 * 1_024 / 2


def test_the_shapes_are_those_of_weights() -> None:
    for shape in SHAPES.values():
        assert shape.groups * (shape.group or shape.inputs) == shape.inputs
    assert SHAPES["llama3-8b down, int4 by 32"].bytes == 4_096 * 14_336 // 2


def test_a_form_is_traced_once_for_many_layers() -> None:
    call = make_call(SMALL["by channel"], 2)
    step = jax.jit(lambda *call: [xla.quant_matmul(*call, dtype=jnp.float32) for _ in range(3)])
    assert step.lower(*call).as_text().count("func.func private @quant_matmul") == 1
