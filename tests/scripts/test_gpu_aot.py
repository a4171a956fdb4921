"""What scripts/gpu_aot.py does without a compiler: reading machine code, finding the toolkit, printing tables."""

import os
import subprocess
import sys

import pytest

from .conftest import SCRIPTS


@pytest.fixture(scope="module")
def aot(script):
    """The modules of the package `aot`, by name."""
    script("gpu_aot")
    return {name.partition(".")[2]: module for name, module in sys.modules.items() if name.startswith("aot.")}


def code(*lines):
    """A compiled text: labels as they are, instructions as (cycles, text)."""
    text, at = ["\t.target sm_90a", ".text.kernel:"], 0
    for line in lines:
        if isinstance(line, str):
            text.append(f"{line}:")
            continue
        stall, instruction = line
        guard = "" if instruction.startswith("@") else "  "
        text.append(f"   1&2:-:3:Y:{stall:02}        /*{at:04x}*/   {guard}             {instruction} ")
        at += 16
    return "\n".join(text)


MULTIPLY = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8].tnspB, R24, gsb0"
# A loop that waits by a second loop, which lies behind the end of the kernel and leads back.
WAITING = [
    (1, "S2R R152, SR_TID.X"),
    ".L_x_9",
    (2, "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R26"),
    (5, "@!P1 BRA `(.L_x_5)"),
    ".L_x_10",
    (4, MULTIPLY),
    (5, "@P2 BRA `(.L_x_8)"),
    (5, "BRA `(.L_x_9)"),
    ".L_x_8",
    (5, "EXIT"),
    ".L_x_5",
    (1, "@!P1 NANOSLEEP.SYNCS 0x989680"),
    (5, "@!P1 BRA `(.L_x_5)"),
    (5, "BRA `(.L_x_10)"),
]


def test_a_loop_is_what_goes_round_and_not_what_waits_inside(aot):
    found = aot["sass"].parse(code(*WAITING))
    assert [(loop.header, sorted(loop.body)) for loop in found.loops] == [(1, [1, 2, 3, 4, 5, 7, 8, 9]), (7, [7, 8])]
    assert found.main is found.loops[0]
    assert found.cycles(found.main) == 2 + 5 + 4 + 5 + 5 + 5  # the last leads back from where it waited
    assert found.products(found.main) == 2 * 64 * 128 * 16


def test_a_branch_back_to_where_one_need_not_have_been_closes_no_loop(aot):
    text = code(
        (1, "@P0 BRA `(.L_x_2)"),
        ".L_x_1",
        (1, "IADD3 R1, R1, 0x1, RZ"),
        ".L_x_2",
        (1, "@P1 BRA `(.L_x_1)"),
        (1, "EXIT"),
    )
    assert aot["sass"].parse(text).loops == ()


@pytest.mark.parametrize(
    ("between", "loops"),
    [
        ((1, "EXIT"), 0),  # nothing behind it is reached from the loop's head
        ((1, "@P3 EXIT"), 1),
        ((1, "BRA.DIV UR4, `(.L_x_3)"), 1),
        ((1, "CALL.REL.NOINC `(.L_x_3)"), 1),
        ((1, "BRA `(.L_x_3)"), 0),
    ],
)
def test_what_may_go_on_behind_an_instruction(aot, between, loops):
    text = code(".L_x_1", (1, "UTMALDG.4D [UR8], [UR4]"), between, (1, "@P1 BRA `(.L_x_1)"), ".L_x_3", (1, "EXIT"))
    found = aot["sass"].parse(text)
    assert len(found.loops) == loops
    assert (found.main is not None) == bool(loops)


@pytest.mark.parametrize("text", ["", code((1, "BRX R2 -0x10"))])
def test_what_cannot_be_followed_is_refused(aot, text):
    with pytest.raises(ValueError, match="expected instructions whose jumps are known"):
        aot["sass"].parse(text)


def test_an_sm_runs_as_many_programs_as_its_registers_and_its_shared_memory_hold(aot):
    def programs(registers, shared, threads=128):
        return aot["cuda"].Kernel(registers, 0, shared, threads, aot["sass"].parse(code((1, "EXIT")))).programs

    assert programs(128, 1_024) == 4
    assert programs(129, 1_024) == 3  # registers are handed out by 8
    assert programs(32, 110 * 1_024) == 2
    assert programs(255, 227 * 1_024) == 1


def test_clock_and_memory_of_an_h200_follow_from_its_data_sheet(aot):
    cuda = aot["cuda"]
    peak = 132 * 4_096 * 1.83e9  # products and sums of every SM and cycle
    assert peak == pytest.approx(989e12, rel=0.001)
    assert cuda.dma_cycles(4.8e12 / 132) == pytest.approx(1.83e9, rel=0.001)  # a second's share of an SM


def test_without_the_compiler_it_says_what_to_do():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, SCRIPTS / "gpu_aot.py"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("gpu_aot: no compiler for CUDA: expected JAX's plugin for CUDA 13")
    assert "`make cuda`" in done.stderr


def test_tables_have_a_row_for_what_was_compiled_and_a_line_for_what_was_not(aot):
    table = aot["cuda_table"]
    case = aot["kernels"].Case("kv_write", "x", "int8", len, ())
    figures = table.Figures("kv_write", "x", "int8", 20, 0, 8_192, 21, 1_234, 164, 0.0, None, None, 1.0)
    decode = table.Figures("decode", "y", "bfloat16", 217, 0, 94_208, 2, 1_432, 1_303, 512.0, 1_648.0, 0.5507, 1.0)
    outcomes = [table.Outcome(case, figures), table.Outcome(case, decode), table.Outcome(case, fault="ValueError: no")]
    ((titles, *rows),) = table.tables(outcomes)
    assert len(titles) == len(rows[0])
    assert rows[0] == ("kv_write", "x", "int8", "20", "0", "8", "21", "1,234", "164", "0", "", "")
    assert rows[1][-3:] == ("512", "1,648", "0.55")
    assert outcomes[2].record() == {"job": str(case), "fault": "ValueError: no", "refusal": None}
    assert outcomes[0].record()["registers"] == 20
    assert table.run(aot["steps"].StepJob("no-such-model", "decode", aot["steps"].Serving())).fault.startswith(
        "ValueError: no model"
    )
