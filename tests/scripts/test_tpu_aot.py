"""What scripts/tpu_aot.py does without a compiler: reading text, facts of chips, finding libtpu, printing tables."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from jaxinfer.roofline import CHIPS

from .conftest import SCRIPTS

HEAD = "== CAPACITY:\nMXU, VALU, VLOAD, SALU\n 2 4 3 2\n== UTILIZATION:\n"


@pytest.fixture(scope="module")
def aot(script):
    """The modules of the package `aot`, by name."""
    script("tpu_aot")
    return {name.partition(".")[2]: module for name, module in sys.modules.items() if name.startswith("aot.")}


def code(*bundles, slots=None):
    """A compiled text: each bundle as (marks before its brace, instructions, regions)."""
    lines = [
        f"{'0x' + format(at, 'x') if at else '0':>6} {marks} {{ {' ;;  '.join(body)} }} /* {regions} */\n"
        for at, (marks, body, regions) in enumerate(bundles)
    ]
    return "LB: loop body\n\n" + "".join(lines), HEAD + (slots or "0 1 0 1\n" * len(bundles))


BACK = "%9 = sbr.rel (!%p1_p0) target = $region7"
LOOP = [
    ("  :", ["%s5_s1 = smov.u32 0 /* copy */"], ""),
    ("LB: >", ["%s6_s2 = sphi %s5_s1, %s8_s2 /* phi */", "%s8_s2 = sadd.s32 1, %s6_s2 /* x */"], "Start region 7"),
    ("  : >", ["%p1_p0 = scmp.ge.s32.totalorder %s8_s2, 12 /* loop exit test */"], ""),
    ("  : >", ["%3 = dma.done.wait (%p2), %s4, 64 /* for %4 = dma.hbm_to_vmem */", BACK], ""),
    ("  : >", ["%v2 = vadd.f32 %v1, %v1"], "End region 7"),
    ("PF:", [], "Start/End empty region 9"),
]


def test_a_loop_is_from_its_region_to_the_end_of_the_delay_slots(aot):
    schedule = aot["bundles"].parse(*code(*LOOP), delay=1, granule=32)
    (loop,) = schedule.loops
    assert (loop.start, loop.end, loop.trips, loop.depth, loop.own) == (1, 5, 12, 1, 4)
    assert (loop.awaited, loop.started) == (64 * 32, 0)  # what a comment quotes is no instruction
    assert loop.busiest == "SALU 50%"
    assert schedule.main is loop
    assert loop.turn(copies=5) == (4, 2048)
    assert schedule.operations()["vadd.f32"] == 1


@pytest.mark.parametrize(
    ("old", "new", "trips"),
    [
        ("smov.u32 0 ", "smov.u32 4 ", None),  # it does not begin at 0
        ("sadd.s32 1,", "sadd.s32 2,", None),  # it counts by twos
        ("%s8_s2, 12 ", "%s8_s2, %s11_s1 ", None),  # to what is computed
        ("(!%p1_p0)", "(%p1_p0)", None),  # it ends where it would go on
        ("smov.u32 0 ", "smov (!%p4_p1), 0 ", 12),
        ("%s8_s2, 12 ", "%s8_s2, 3 ", 3),
    ],
)
def test_trips_are_known_only_of_a_loop_that_counts_from_0_to_a_constant(aot, old, new, trips):
    text, slots = code(*LOOP)
    assert old in text
    (loop,) = aot["bundles"].parse(text.replace(old, new), slots, delay=1, granule=32).loops
    assert loop.trips == trips


def test_a_loop_that_runs_once_is_part_of_the_loop_around_it(aot):
    once = [
        ("  : >", ["%s3_s1 = smov.u32 0 /* copy */"], "Start region 5"),
        ("LB: >>", ["%s4_s2 = sphi %s3_s1, %s2_s2 /* phi */", "%s2_s2 = sadd.s32 1, %s4_s2 /* x */"], "Start region 6"),
        ("  : >>", ["%p2_p0 = scmp.ge.s32.totalorder %s2_s2, 1 /* loop exit test */"], ""),
        ("  : >>", ["%3 = dma.done.wait (%p2), %s4, 64 /* x */", "%v9 = vadd.f32 %v1, %v1"], ""),
        ("  : >>", ["%8 = sbr.rel (!%p2_p0) target = $region6"], ""),
        ("  : >>", ["%v2 = vadd.f32 %v1, %v1"], "End region 6"),
        ("  : >", ["%v2 = vadd.f32 %v1, %v1"], ""),
        ("  : >", ["%9 = sbr.rel (!%p1_p0) target = $region5"], ""),
        ("  : >", ["%v2 = vadd.f32 %v1, %v1"], "End region 5"),
    ]
    schedule = aot["bundles"].parse(*code(*once), delay=1, granule=32)
    around, inner = schedule.loops
    assert (inner.trips, inner.vector, inner.waits) == (1, True, True)
    assert schedule.main is around
    assert around.turn(copies=9) == (9, 64 * 32)


def test_a_text_that_is_not_understood_is_an_error(aot):
    parse, (text, slots) = aot["bundles"].parse, code(*LOOP)
    with pytest.raises(ValueError, match="expected bundles 0, 1, 2"):
        parse("nothing", slots, delay=1, granule=32)
    with pytest.raises(ValueError, match="expected bundles 0, 1, 2"):
        parse(text.replace("0x3 ", "0x4 "), slots, delay=1, granule=32)
    with pytest.raises(ValueError, match=r"slots of 5 bundles; expected 6"):
        parse(text, slots.removesuffix("0 1 0 1\n"), delay=1, granule=32)
    deeper = parse(text.replace(": > {", ": >> {"), slots, delay=1, granule=32)
    with pytest.raises(ValueError, match=r"marked as inside 2 loops; 1 were found"):
        _ = deeper.loops


def test_a_loop_of_copies_runs_as_often_as_one_says_and_the_loop_around_it_is_the_main_one(aot):
    loop = aot["bundles"].Loop(
        start=3,
        end=9,
        depth=2,
        trips=None,
        shortest=6,
        own=6,
        vector=False,
        started=0,
        awaited=100,
        busiest="",
        inner=(),
    )
    outer = replace(loop, start=0, end=20, depth=1, own=14, vector=True, awaited=0, inner=(loop,))
    assert outer.turn(copies=16) == (14 + 16 * 6, 1600)
    assert replace(outer, inner=(replace(loop, trips=4),)).turn(copies=16) == (14 + 4 * 6, 400)
    assert replace(outer, inner=(replace(loop, vector=True),)).turn(copies=16) == (14 + 6, 100)
    assert replace(outer, inner=(replace(loop, awaited=None),)).turn(copies=16) == (14 + 16 * 6, None)


def test_a_call_is_known_by_the_name_it_was_given(aot):
    calls = ["kv_write", "kv_write.4", "kv_write.4.pool_0_", "kv_write.pool_0_"]  # the latter of libtpu 0.0.50
    assert {aot["compiling"].given_name(call) for call in calls} == {"kv_write"}


def test_clocks_are_what_the_peaks_of_the_data_sheets_say(aot):
    """A peak is a clock times the products a cycle: four units of 128 x 128 a core, four times that from v6e on."""
    for name, chip in aot["chips"].GENERATIONS.items():
        a_cycle = 2 * 4 * 128 * 128 * (4 if name in ("v6e", "tpu7x") else 1)
        assert chip.clock * chip.cores * a_cycle == pytest.approx(chip.chip.flops, rel=2e-3)


def test_cycles_of_a_copy(aot):
    chips = aot["chips"]
    v6e, v5p = chips.generation("v6e"), chips.generation("v5p")
    assert v6e.dma_cycles(CHIPS["TPU v6e"].bandwidth) == pytest.approx(v6e.clock)
    assert v5p.dma_cycles(CHIPS["TPU v5p"].bandwidth) == pytest.approx(2 * v5p.clock)  # two cores share it
    with pytest.raises(ValueError, match=r"no TPU generation 'v7'; expected one of v4, v5e, v5p, v6e, tpu7x"):
        chips.generation("v7")


def test_the_library_is_found_under_the_folder_that_is_named(aot, tmp_path, monkeypatch):
    libtpu = aot["libtpu"]
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(libtpu.NoLibtpuError, match=r"got neither a folder nor TPU_LIBRARY_PATH. `make libtpu`"):
        libtpu.library()
    with pytest.raises(libtpu.NoLibtpuError, match=r"no libtpu.so in .*`make libtpu`"):
        libtpu.library(str(tmp_path))
    (tmp_path / "libtpu").mkdir()
    file = tmp_path / "libtpu" / "libtpu.so"
    file.touch()
    assert libtpu.library(str(tmp_path)) == libtpu.library(str(file)) == file
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(file))
    assert libtpu.library() == file


@pytest.fixture
def outcomes(aot):
    kernel = aot["figures"].Figures(
        "decode", "x", "int8", "v6e", 900, 300, 1000, 600.0, 0.5, 500, 150.0, "VALU 9%", 1, 1.0
    )
    case = aot["kernels"].Case("decode", "x", "int8", len, ())
    Outcome = aot["table"].Outcome
    return [
        Outcome(case, "v6e", kernel),
        Outcome(case, "v4", replace(kernel, chip="v4", ratio=2.0, unit_bundles=1712.0)),
        Outcome(case, "v5e", fault="JaxRuntimeError: no"),
        Outcome(case, "tpu7x", refusal="too wide"),
        Outcome(case, "v5p", replace(kernel, chip="v5p", ratio=None, unit_bundles=None)),
    ]


def test_the_tables_say_what_was_found(aot, outcomes):
    text = aot["table"].text(outcomes).splitlines()
    assert [line.split()[-2:] for line in text[1:4]] == [["0.50", "memory"], ["2.00", "bundles"], ["-", "-"]]
    assert text[-2:] == [
        "decode [x] int8 on tpu7x is left to XLA: too wide",
        "decode [x] int8 on v5e: JaxRuntimeError: no",
    ]
    row = aot["table"].markdown(outcomes).splitlines()[-1]
    assert row == "| `decode` | x | int8 | 1,712 / 1 = **2.00** | 900 in all | 150 / 1 = 0.50 |"
    records = [one.record() for one in outcomes]
    assert [record["fault"] for record in records] == [None, None, "JaxRuntimeError: no", None, None]
    assert [record["refusal"] for record in records] == [None] * 3 + ["too wide", None]
    assert records[0]["bound"] == "memory"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--chip", "v7"], "no TPU generation 'v7'"),
        (["--kernel", "softmax"], "no operation 'softmax'"),
        (["--kernel", "kv_write", "--dtype", "float99"], "no dtype 'float99' of a kernel's pages"),
        (["--model", "none", "--shape", "zzz"], "nothing to compile: no kernel with a shape that has 'zzz'"),
        (["--kernel", "none", "--model", "gpt"], "no model 'gpt'"),
        (["--libtpu", "no/such/folder"], "no libtpu.so in no/such/folder"),
        (["--chip", "v6e", "kernel", "kv_write"], "options of kernel come behind it; got some before it"),
    ],
)
def test_a_wrong_word_on_the_command_line_ends_it_with_one_line(arguments, complaint, tmp_path):
    (tmp_path / "libtpu.so").touch()
    given = arguments if "--libtpu" in arguments else [*arguments, "--libtpu", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, SCRIPTS / "tpu_aot.py", *given],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("tpu_aot: ")
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
