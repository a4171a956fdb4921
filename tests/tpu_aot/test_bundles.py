"""Bundles and loops are read rightly: small kernels whose loops are known, compiled for every generation."""

import jax
import jax.numpy as jnp
import pytest
from aot.chips import GENERATIONS
from aot.compiling import compile_for
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

F32 = jnp.float32
TILE = jax.ShapeDtypeStruct((8, 128), F32)
COUNT = jax.ShapeDtypeStruct((1,), jnp.int32)
ROWS = jax.ShapeDtypeStruct((64, 128), F32)
LARGE = 2**16
"""Rows of an array that XLA leaves in HBM: a small one it would lay into VMEM before the kernel runs."""
SMEM, VMEM, ANY = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM, pl.ANY))


def compiled(chip, body, *args, specs, scratch=(), grid=()):
    call = pl.pallas_call(
        body, grid=grid, out_shape=TILE, in_specs=specs, scratch_shapes=scratch, name="known", out_specs=VMEM
    )
    return compile_for(chip, call, *args).kernel("known")


def chain(times):
    """A loop of unknown length whose body is `times` times the same two dependent operations."""

    def body(count, x, out):
        def step(i, total):
            rows = x[pl.ds(pl.multiple_of(i * 8, 8), 8), :]
            for _ in range(times):
                total = total * 1.5 + rows
            return total

        out[...] = jax.lax.fori_loop(0, count[0], step, jnp.zeros((8, 128), F32))

    return body


@pytest.mark.parametrize("chip", GENERATIONS)
def test_a_loop_of_a_body_twice_as_long_is_longer_by_as_much_as_the_kernel(chip):
    short, middle, long = (compiled(chip, chain(n), COUNT, ROWS, specs=[SMEM, VMEM]) for n in (4, 8, 16))
    for schedule in (short, middle, long):
        (loop,) = schedule.loops
        assert (loop.depth, loop.trips, loop.own) == (1, None, loop.bundles)
        assert loop.shortest == loop.bundles
        assert schedule.main == loop
    loops = [schedule.main.bundles for schedule in (short, middle, long)]
    wholes = [schedule.bundles for schedule in (short, middle, long)]
    assert loops[2] - loops[1] == wholes[2] - wholes[1] == 2 * (loops[1] - loops[0]) == 2 * (wholes[1] - wholes[0])
    # A multiplication and an addition that waits for it: at least two bundles a time.
    assert loops[1] - loops[0] >= 8


@pytest.mark.parametrize("chip", GENERATIONS)
def test_a_loop_ends_behind_the_delay_slots_of_its_branch(chip):
    """The bundle after the last one is where the code goes on when the loop is over."""
    schedule = compiled(chip, chain(4), COUNT, ROWS, specs=[SMEM, VMEM])
    (loop,) = schedule.loops
    branches = [at for at in range(loop.start, loop.end) if "= sbr.rel" in schedule.lines[at]]
    assert branches == [loop.end - 1 - GENERATIONS[chip].branch_delay]
    assert schedule.lines[loop.end].split(":")[0].endswith("PF")
    assert "LB" in schedule.lines[loop.start].split(":")[0]


def nested(inner, outer):
    def body(count, x, out):
        out[...] = jnp.zeros((8, 128), F32)

        def step(i, carry):
            def inside(j, carry):
                out[...] = out[...] * 1.5 + x[pl.ds(pl.multiple_of(j * 8, 8), 8), :]
                return carry

            return jax.lax.fori_loop(0, inner, inside, carry)

        jax.lax.fori_loop(0, count[0] if outer is None else outer, step, 0)

    return body


@pytest.mark.parametrize("chip", GENERATIONS)
def test_loops_in_loops_and_how_often_they_run(chip):
    schedule = compiled(chip, nested(6, None), COUNT, ROWS, specs=[SMEM, VMEM])
    outer, inner = schedule.loops
    assert (outer.depth, outer.trips, outer.inner) == (1, None, (inner,))
    assert (inner.depth, inner.trips, inner.inner) == (2, 6, ())
    assert outer.own == outer.bundles - inner.bundles
    assert outer.turn(copies=1) == (outer.own + 6 * inner.bundles, 0)
    outer, inner = compiled(chip, nested(5, 7), COUNT, ROWS, specs=[SMEM, VMEM]).loops
    assert (outer.trips, inner.trips) == (7, 5)


def copies(tokens, together):
    """A loop that waits for `together` copies of [tokens, 128] float32 in a turn, in a loop of its own from 2 on."""

    def body(count, pages, out, room, arrived):
        def copy(place):
            return pltpu.make_async_copy(pages.at[place], room.at[place], arrived)

        def step(i, total):
            for place in range(together):
                copy(place).start()
            for place in range(together):
                copy(place).wait()
            return total + room[0, :8]

        out[...] = jax.lax.fori_loop(0, count[0], step, jnp.zeros((8, 128), F32))

    pages = jax.ShapeDtypeStruct((LARGE, tokens, 128), F32)
    return body, pages, [pltpu.VMEM((together, tokens, 128), F32), pltpu.SemaphoreType.DMA]


@pytest.mark.parametrize("chip", GENERATIONS)
@pytest.mark.parametrize(("tokens", "together"), [(8, 1), (64, 1), (64, 3)])
def test_bytes_that_a_loop_waits_for(chip, tokens, together):
    body, pages, scratch = copies(tokens, together)
    loop = compiled(chip, body, COUNT, pages, specs=[SMEM, ANY], scratch=scratch).main
    assert loop.awaited == together * tokens * 128 * 4
    assert loop.started == together
    assert loop.vector


@pytest.mark.parametrize("chip", GENERATIONS)
def test_a_loop_that_only_copies_runs_as_often_as_one_says(chip):
    def body(count, pages, out, room, arrived):
        def copy(place):
            return pltpu.make_async_copy(pages.at[place], room.at[place], arrived)

        def step(i, total):
            jax.lax.fori_loop(0, count[0], lambda place, _: copy(place).start(), None)
            jax.lax.fori_loop(0, count[0], lambda place, _: copy(place).wait(), None)
            for _ in range(8):  # more than the delay slots of the last branch can take
                total = total * 1.5 + room[0]
            return total

        out[...] = jax.lax.fori_loop(0, count[0], step, jnp.zeros((8, 128), F32))

    pages = jax.ShapeDtypeStruct((LARGE, 8, 128), F32)
    scratch = [pltpu.VMEM((16, 8, 128), F32), pltpu.SemaphoreType.DMA]
    schedule = compiled(chip, body, COUNT, pages, specs=[SMEM, ANY], scratch=scratch)
    main = schedule.main
    start, wait = main.inner
    assert (main.depth, main.vector, start.vector, wait.vector) == (1, True, False, False)
    assert (start.started, start.awaited, wait.started, wait.awaited) == (1, 0, 0, 4096)
    assert main.turn(copies=16) == (main.own + 16 * (start.bundles + wait.bundles), 16 * 4096)


@pytest.mark.parametrize("chip", GENERATIONS)
def test_what_a_turn_may_skip_is_not_in_the_shortest_way(chip):
    def body(count, x, out):
        out[...] = jnp.zeros((8, 128), F32)

        def step(i, carry):
            @pl.when(i == 3)
            def _():
                for _ in range(40):
                    out[...] = jnp.exp(out[...] * x[pl.ds(pl.multiple_of(i * 8, 8), 8), :])

            return carry

        jax.lax.fori_loop(0, count[0], step, 0)

    (loop,) = compiled(chip, body, COUNT, ROWS, specs=[SMEM, VMEM]).loops
    assert loop.bundles > 80
    assert loop.shortest < loop.bundles - 80


def test_slots_count_what_the_bundles_hold():
    schedule = compiled("v6e", chain(8), COUNT, ROWS, specs=[SMEM, VMEM])
    assert len(schedule.slots) == schedule.bundles
    per_name = dict(zip(schedule.names, zip(*schedule.slots, strict=True), strict=True))
    operations = schedule.operations(schedule.main)
    assert operations["vmul.f32"] == operations["vadd.f32"] == 8
    assert sum(per_name["VALU"][schedule.main.start : schedule.main.end]) >= 16
    for name, capacity in zip(schedule.names, schedule.capacity, strict=True):
        assert max(per_name[name]) <= capacity


def test_a_program_without_a_kernel_has_none_and_one_that_does_not_fit_says_so():
    program = compile_for("v5e", lambda x: x @ x, jax.ShapeDtypeStruct((512, 512), jnp.bfloat16))
    assert program.kernels == {}
    assert program.argument_bytes == program.output_bytes == 512 * 512 * 2
    with pytest.raises(ValueError, match=r"expected a kernel 'known'; the program has none"):
        program.kernel("known")
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_for("v5e", lambda x: x + 1, jax.ShapeDtypeStruct((2**33,), jnp.bfloat16))
