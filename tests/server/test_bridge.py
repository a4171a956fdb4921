"""The bridge alone: threads, back-pressure, the engine's death. Each test has an event loop of its own."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from jaxinfer.errors import EngineFault, Overloaded, RequestError, Unavailable
from jaxinfer.request import Delta, FinishReason, Request, SamplingParams, Timing, TokenLogprob, Usage
from jaxinfer_server.bridge import Bridge, BridgeLimits
from jaxinfer_server.delta_stream import joined


def request(name="r", prompt="letters", **params):
    return Request(name, tuple(prompt.encode()), SamplingParams(**({"max_tokens": 3000} | params)), 0, frozenset({256}))


@asynccontextmanager
async def bridged(assembly, **limits):
    bridge = Bridge(assembly.loop, assembly.tokenizer, BridgeLimits(**limits))
    bridge.start()
    try:
        yield bridge
    finally:
        await bridge.close()


def run(coroutine):
    """Its result; a hang is a failure."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def read(bridge, wanted):
    async with bridge.stream(wanted) as deltas:
        return [delta async for delta in deltas]


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("still not so")


async def until_idle(bridge):
    for _ in range(2000):
        stats = await bridge.stats()
        if stats.running == stats.waiting == 0:
            return stats
        await asyncio.sleep(0.01)
    raise AssertionError("still not idle")


def test_a_stream_is_the_loops_output(doubles):
    async def main():
        async with bridged(doubles.scripted_assembly()) as bridge:
            deltas = await read(bridge, request(prompt="say:hello"))
            assert joined(deltas).text == "hello"
            assert [delta.finish for delta in deltas if delta.finish] == [FinishReason.STOP]
            assert bridge.open_streams == 0

    run(main())


def test_leaving_early_frees_the_request_within_a_step(doubles):
    async def main():
        assembly = doubles.scripted_assembly()
        permits = threading.Semaphore(5)
        assembly.runner.before_step = permits.acquire
        async with bridged(assembly) as bridge:
            async with bridge.stream(request()) as deltas:
                await anext(deltas)
            assert bridge.running == bridge.open_streams == 0
            permits.release(6)  # what may have been asked for before, and one step more
            stats = await bridge.stats()
            while stats.running:
                stats = await bridge.stats()
            assert stats.free_pages == 1024
            assert stats.steps <= 7

    run(main())


def test_a_cancelled_task_stops_its_request(doubles):
    async def main():
        async with bridged(doubles.paced_assembly(0.002)) as bridge:
            tasks = [asyncio.create_task(read(bridge, request(f"r{i}"))) for i in range(20)]
            await until(lambda: bridge.running == 20)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            stats = await until_idle(bridge)
            assert stats.free_pages == 1024
            assert stats.output_tokens < 3000  # of 60,000

    run(main())


def test_requests_may_share_an_id_and_are_aborted_together(doubles):
    async def main():
        async with bridged(doubles.paced_assembly(0.001)) as bridge:
            tasks = [asyncio.create_task(read(bridge, request("same"))) for _ in range(2)]
            other = asyncio.create_task(read(bridge, request("other", max_tokens=50)))
            await until(lambda: bridge.open_streams == 3)
            assert bridge.abort("same")
            for deltas in await asyncio.gather(*tasks):
                assert deltas[-1].finish is FinishReason.CANCELLED
            assert (await other)[-1].finish is FinishReason.LENGTH
            assert not bridge.abort("same")

    run(main())


def test_a_request_that_the_loop_refuses_leaves_nothing_behind(doubles):
    async def main():
        async with bridged(doubles.scripted_assembly()) as bridge:
            with pytest.raises(RequestError):
                await read(bridge, Request("r", (999,), SamplingParams(), 0))
            assert bridge.open_streams == 0
            assert bridge.ready

    run(main())


def test_a_slow_reader_is_bounded_and_the_others_are_not_slowed(doubles):
    async def stick(bridge):
        async with bridge.stream(request()) as slow:
            await anext(slow)
            assert joined(await read(bridge, request(prompt="say:quick"))).text == "quick"
            await asyncio.sleep(60)  # stuck, as in a write that nobody reads: the failure frees it

    async def main():
        async with bridged(doubles.scripted_assembly(), buffer=50) as bridge:
            with pytest.raises(Overloaded, match="behind"):
                await stick(bridge)
            assert bridge.open_streams == 0
            assert (await until_idle(bridge)).free_pages == 1024

    run(main())


def test_what_piles_up_comes_joined(doubles):
    async def main():
        async with (
            bridged(doubles.scripted_assembly()) as bridge,
            bridge.stream(request(max_tokens=100, n=2)) as deltas,
        ):
            await until(lambda: bridge.running == 0)
            found = [delta async for delta in deltas]
            assert sorted(delta.choice for delta in found) == [0, 1]
            assert all(len(delta.token_ids) == 100 and delta.finish for delta in found)

    run(main())


def test_joined_keeps_everything():
    ends = {"finish": FinishReason.STOP, "stop_reason": 3, "usage": Usage(1, 2), "timing": Timing(0.0, 1.0)}
    parts = [
        Delta(1, "a", (1,), (TokenLogprob(1, -1.0, b"a"),)),
        Delta(1, "", (2,), (TokenLogprob(2, -2.0, b""),)),
        Delta(1, "b", **ends),
    ]
    assert joined(parts) == Delta(1, "ab", (1, 2), (*parts[0].logprobs, *parts[1].logprobs), **ends)


def test_the_engine_thread_sleeps_while_there_is_nothing_to_do(doubles):
    class Counting(Bridge):
        turns = 0

        def _await_work(self):
            self.turns += 1
            return super()._await_work()

    async def main():
        assembly = doubles.scripted_assembly()
        bridge = Counting(assembly.loop, assembly.tokenizer)
        bridge.start()
        await read(bridge, request(max_tokens=3))
        await bridge.stats()
        await until(lambda: not bridge._working)
        turns = bridge.turns
        await asyncio.sleep(0.3)
        assert bridge.turns == turns > 3
        await bridge.close()

    run(main())


def test_the_death_of_the_engine_thread_reaches_everybody(doubles, caplog):
    async def main():
        assembly = doubles.scripted_assembly()
        gate = threading.Event()
        async with bridged(assembly) as bridge:
            assembly.runner.before_step = gate.wait
            tasks = [asyncio.create_task(read(bridge, request(f"r{i}"))) for i in range(3)]
            await until(lambda: bridge.open_streams == 3)
            assembly.loop.step = None  # nothing of the loop's own handling is left
            gate.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(result) for result in results} == {EngineFault}
            assert not bridge.ready
            with pytest.raises(Unavailable):
                await read(bridge, request())
            with pytest.raises(Unavailable):
                await bridge.stats()

    run(main())
    assert "the engine thread ended" in caplog.text


def test_a_failing_step_ends_every_request_with_an_error(doubles, caplog):
    def fail():
        raise MemoryError("no more")

    async def main():
        assembly = doubles.scripted_assembly()
        assembly.runner.before_step = fail
        async with bridged(assembly) as bridge:
            (end,) = await read(bridge, request())
            assert end.finish is FinishReason.ERROR
            await until(lambda: not bridge.ready)

    run(main())
    assert "no more" in caplog.text


def test_text_that_cannot_be_made_harms_nobody_else(doubles, caplog):
    class Broken:
        stopped_choices = ()

        def feed(self, event):
            raise UnicodeError("no text")

    async def breaking(bridge):
        async with bridge.stream(request()) as deltas:
            deltas.text = Broken()
            await asyncio.sleep(60)

    async def main():
        async with bridged(doubles.paced_assembly(0.001)) as bridge:
            other = asyncio.create_task(read(bridge, request(prompt="say:fine")))
            with pytest.raises(EngineFault, match="text"):
                await breaking(bridge)
            assert joined(await other).text == "fine"
            assert bridge.ready

    run(main())
    assert "could not be made into text" in caplog.text


def test_no_progress_with_work_running_is_not_ready_until_it_goes_on(doubles):
    async def main():
        assembly = doubles.scripted_assembly()
        gate = threading.Event()
        async with bridged(assembly, stall=0.05) as bridge:
            assembly.runner.before_step = gate.wait
            task = asyncio.create_task(read(bridge, request(max_tokens=2000)))
            await until(lambda: not bridge.ready)
            assert bridge.stalled
            gate.set()
            await task
            await until(lambda: bridge.ready)
            await asyncio.sleep(0.1)
            assert bridge.ready  # idle is no stall

    run(main())


def test_drain_lets_the_running_finish_and_refuses_the_new(doubles):
    async def main():
        async with bridged(doubles.paced_assembly(0.001)) as bridge:
            running = asyncio.create_task(read(bridge, request(max_tokens=100)))
            await until(lambda: bridge.open_streams == 1)
            draining = asyncio.create_task(bridge.drain(30))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable, match="draining"):
                await read(bridge, request())
            assert not bridge.ready
            assert await draining
            assert (await running)[-1].finish is FinishReason.LENGTH

    run(main())


def test_drain_waits_for_output_that_is_not_read_yet(doubles):
    async def main():
        async with bridged(doubles.scripted_assembly()) as bridge:
            async with bridge.stream(request(max_tokens=10)) as deltas:
                await until(lambda: bridge.running == 0)
                draining = asyncio.create_task(bridge.drain(30))
                await asyncio.sleep(0.1)
                assert not draining.done()
                assert len(joined([delta async for delta in deltas]).token_ids) == 10
            assert await draining

    run(main())


def test_drain_gives_up_after_its_grace_and_close_ends_the_rest(doubles):
    async def main():
        async with bridged(doubles.paced_assembly(0.01)) as bridge:
            running = asyncio.create_task(read(bridge, request()))
            await until(lambda: bridge.open_streams == 1)
            assert not await bridge.drain(0.05)
        with pytest.raises(Unavailable, match="stopped"):
            await running

    run(main())


def test_a_step_that_hangs_does_not_keep_the_server_from_closing(doubles, caplog):
    gate = threading.Event()

    async def main():
        assembly = doubles.scripted_assembly()
        assembly.runner.before_step = gate.wait
        bridge = Bridge(assembly.loop, assembly.tokenizer)
        bridge.start()
        stuck = asyncio.create_task(read(bridge, request()))
        await until(lambda: bridge.open_streams == 1)
        await bridge.close(wait=0.05)
        with pytest.raises(Unavailable):
            await stuck
        return bridge._thread

    thread = run(main())
    gate.set()
    thread.join(10)
    assert not thread.is_alive()
    assert "left behind" in caplog.text
