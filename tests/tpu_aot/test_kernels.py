"""Every TPU kernel compiles for every generation; decode attention reads as fast as the memory gives.

Which shapes and dtypes of pages: for v6e all, bfloat16, float32 and int8. For the others all shapes of bfloat16 and
int8, on v4 of float32 too, but of products 8 rows of bfloat16. Products are not tried for v4, which leaves them to XLA.
"""

import jax
import pytest
from aot.chips import GENERATIONS
from aot.compiling import compile_all, mesh, on
from aot.figures import measure
from aot.kernels import DTYPES, OPERATIONS, cases
from aot.table import run


def lowering(case, devices):
    return lambda: case.jitted(devices).lower(*on(devices, case.args))


LARGEST = "gemma2-9b"
"""Eight heads of 256 features: what prefill attention keeps in VMEM is most here. v4 and v5e have least of it."""


def tried(case, chip):
    """As the module says; and the largest blocks of prefill attention where VMEM is smallest, of float32 alone."""
    if chip == "v6e":
        return True
    if case.operation == "quant_matmul":
        return case.dtype == "bfloat16" and case.shape.endswith(", 8 rows")
    if case.shape.startswith(LARGEST):
        return chip in ("v4", "v5e") and case.dtype == "float32"
    return chip == "v4" or case.dtype != "float32"


# Numbers of a weight are int8 or int4 whatever the dtype of what they meet.
PAIRS = [(operation, dtype) for operation in OPERATIONS for dtype in DTYPES if list(cases(operation, (dtype,)))]
TRIED = [
    (chip, *pair)
    for chip in GENERATIONS
    for pair in PAIRS
    if (chip, pair[0]) != ("v4", "quant_matmul") and any(tried(case, chip) for case in cases(pair[0], (pair[1],)))
]


@pytest.mark.parametrize(("chip", "operation", "dtype"), TRIED)
def test_every_shape_compiles(chip, operation, dtype):
    devices = mesh(chip)
    here = [case for case in cases(operation, (dtype,)) if tried(case, chip) and case.refusal(devices) is None]
    assert here
    assert compile_all(chip, {case.shape: lowering(case, devices) for case in here}) == {}


MEASURED = {
    "paged_decode_attention": "llama3-8b 16 x 1024, pages of 128",
    "paged_prefill_attention": "llama3-8b last chunk of 1024, pages of 128",
    "kv_write": "llama3-8b prefill 128, pages of 16",
    "quant_matmul": "llama3-8b down, int8, 8 rows",
}


@pytest.mark.parametrize(("operation", "dtype"), PAIRS)
def test_a_kernel_of_each_operation_and_dtype_is_measured(operation, dtype):
    (case,) = cases(operation, (dtype,), MEASURED[operation])
    outcome = run(case, "v6e")
    assert outcome.fault is None
    found = outcome.found
    assert found.turn_bytes >= (found.unit_bytes if operation == "kv_write" else 1)
    assert found.unit_bundles == pytest.approx(found.ratio * GENERATIONS["v6e"].dma_cycles(found.unit_bytes))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_only_products_of_many_rows_and_those_on_v4_are_left_to_xla(operation):
    products = operation == "quant_matmul"
    refused = {case.shape for case in cases(operation) if case.refusal(mesh("v5e"))}
    assert refused == {case.shape for case in cases(operation) if products and case.shape.endswith(", 512 rows")}
    refused = [case.shape for case in cases(operation) if "v4: plain XLA" in (case.refusal(mesh("v4")) or "")]
    assert refused == [case.shape for case in cases(operation) if products]


# The statement that decode attention is bound by memory: of Llama 3.1 8B, bfloat16, pages of 128 tokens.
DECODE = MEASURED["paged_decode_attention"]


@pytest.mark.parametrize("chip", GENERATIONS)
def test_decode_attention_issues_fewer_bundles_than_its_pages_take_to_arrive(chip):
    (case,) = cases("paged_decode_attention", ("bfloat16",), DECODE)
    found, _ = measure(case, chip)
    assert case.unit_bytes == 2 * 8 * 128 * 128 * 2
    assert found.turn_bytes % case.unit_bytes == 0  # a turn waits for whole pages and for nothing else
    assert found.unit_bundles <= GENERATIONS[chip].dma_cycles(case.unit_bytes)
    assert found.bound == "memory"


def test_what_a_kernel_refuses_or_the_compiler_does_is_named():
    def refused():
        raise NotImplementedError("not this one")

    devices = mesh("v5e")
    large = on(devices, jax.ShapeDtypeStruct((2**33,), "bfloat16"))
    small = on(devices, jax.ShapeDtypeStruct((2**3,), "bfloat16"))
    double = jax.jit(lambda x: x + x)
    jobs = {"a": refused, "b": lambda: double.lower(large), "c": lambda: double.lower(small)}
    errors = compile_all("v5e", jobs)
    assert {name: type(error) for name, error in errors.items()} == {
        "a": NotImplementedError,
        "b": jax.errors.JaxRuntimeError,
    }
