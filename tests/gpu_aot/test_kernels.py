"""Every GPU kernel compiles for an H200 at every shape, keeps its numbers in registers, and writes pages in place."""

from functools import cache

import pytest
from aot import cuda
from aot.cuda_table import block_bytes, measure
from aot.kernels import cases

from pallas_kernels.dispatch import OPERATIONS
from pallas_kernels.gpu_attention import KEYS, ROWS
from pallas_kernels.pages import page_shape

ATTENTION = ("paged_decode_attention", "paged_prefill_attention")
CASES = [
    case
    for operation in OPERATIONS
    for case in cases(operation, ("bfloat16", "int8"), form="gpu")
    # Rows up to a tile's are one code; of the other shapes the small weights say nothing new.
    if operation != "quant_matmul" or case.shape.endswith((", 8 rows", ", 512 rows"))
]
DONE = [case for case in CASES if case.refusal() is None]


@cache
def measured(name):
    (case,) = (case for case in DONE if str(case) == name)
    return measure(case)


def is_attention(case):
    return case.operation in ATTENTION


def head_dim(case):
    return page_shape(case.args[1])[4]


def is_wide(case):
    """Whether a thread's part of a head is more than its registers hold: such heads spill, by docs/gpu.md."""
    return is_attention(case) and head_dim(case) > 128


@pytest.mark.parametrize("case", [case for case in DONE if not is_wide(case)], ids=str)
def test_registers_hold_what_a_thread_works_with(case):
    found, _ = measured(str(case))
    assert found.spilled <= (16 if case.dtype == "int8" else 0)
    assert found.programs >= (2 if is_attention(case) else 1)  # one computes while another waits


@pytest.mark.parametrize("case", [case for case in DONE if is_attention(case)], ids=str)
def test_a_turn_of_attention_multiplies_a_tile_with_a_block_of_keys_and_of_values(case):
    found, _ = measured(str(case))
    assert found.tensor_cycles * cuda.TENSOR_RATE == 2 * 2 * ROWS * KEYS * head_dim(case)


@pytest.mark.parametrize("case", [case for case in DONE if case.operation == "kv_write"], ids=str)
def test_pages_are_written_in_place(case):
    _, program = measured(str(case))
    pool = sum(leaf.size * leaf.dtype.itemsize for leaf in (case.args[0] if case.dtype == "int8" else case.args[:1]))
    assert program.alias_bytes == pool
    assert program.temporary_bytes < pool / 1_000


# That decode attention is bound by memory: of Llama 3.1 8B, bfloat16, pages of 128 tokens. int8 is not: docs/gpu.md.
def test_decode_attention_issues_a_block_in_fewer_cycles_than_it_takes_to_arrive():
    (case,) = cases("paged_decode_attention", ("bfloat16",), "llama3-8b 16 x 1024, pages of 128", "gpu")
    found, _ = measured(str(case))
    assert block_bytes(case) == 2 * KEYS * 128 * 2
    assert found.issue_cycles + found.tensor_cycles <= found.programs * found.dma_cycles


def test_only_one_plane_and_what_does_not_fit_a_tile_is_left_to_xla():
    refused = {str(case): case.refusal() for case in CASES if case not in DONE}
    assert {name.partition(" ")[0] for name in refused} <= {*ATTENTION, "quant_matmul"}
    assert all("one plane" in name for name in refused if name.startswith(ATTENTION))
