"""The two sides of `bench_peers.py`, each in a process of its own: jaxinfer's engine loop, and transformers.

Knows: how each side prefills and decodes given ids and what of it is timed. Compares nothing.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

SETTLE = 0.5  # seconds of rest after a turn: a step that was dispatched ahead, or spinning threads, end in it
Prompts = list[list[int]]


class Peer(Protocol):
    """One side. Times are seconds; `prefill` and `fill` give the first token of each row too."""

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        """Time from the prompt to its first token."""
        ...

    def fill(self, prompts: Prompts) -> list[int]:
        """Make sequences ready to decode, in place of those before."""
        ...

    def decode(self, steps: int) -> list[float]:
        """Time of each of `steps` steps over all sequences that `fill` made ready."""
        ...


class Ours:
    """jaxinfer through its engine loop, `slots` sequences at most."""

    def __init__(self, ref: str, slots: int = 32) -> None:
        from jaxinfer.assembly import assemble
        from jaxinfer.config import CacheConfig, EngineConfig

        cache = CacheConfig(pages=slots * 24)  # each row has room for 1,024 tokens and the most turns
        self._assembly = assemble(ref, EngineConfig(slots=slots, dtype="float32", prefix_cache=False, cache=cache))
        self._live: list[str] = []

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        """Time from `add` to the delivered token."""
        start = time.perf_counter()
        (first,) = self._start([prompt], 1).values()
        return time.perf_counter() - start, first

    def fill(self, prompts: Prompts) -> list[int]:
        """Prefill every prompt for real; the sequences then decode until the next call stops them."""
        from jaxinfer.request import FinishReason

        for request in self._live:
            self._assembly.loop.stop(request, FinishReason.CANCELLED)
        while self._assembly.loop.busy:
            self._assembly.loop.step()
        firsts = self._start(prompts, 1_000)
        self._live = list(firsts)
        return list(firsts.values())

    def decode(self, steps: int) -> list[float]:
        """Times of `step`; the first, whose work was dispatched ahead, is left out."""
        return _timed(self._assembly.loop.step, steps)

    def _start(self, prompts: Prompts, max_tokens: int) -> dict[str, int]:
        from jaxinfer.request import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        requests = [self._assembly.request(prompt, params) for prompt in prompts]
        for request in requests:
            self._assembly.loop.add(request)
        firsts: dict[str, int] = {}
        while len(firsts) < len(requests):
            for event in self._assembly.loop.step():
                if event.tokens:
                    firsts.setdefault(event.request_id, event.tokens[0].token)
        return {request.id: firsts[request.id] for request in requests}


class Theirs:
    """transformers: the same GGUF file, decoded to float32 by transformers itself."""

    def __init__(self, ref: str, threads: int) -> None:
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

        torch.set_num_threads(threads)
        file = Path(ref)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        self._torch = torch
        self._model = model.eval()
        self._cache: Any = None
        self._last: Any = None

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        """Time of one forward pass over the prompt, logits of its last token only."""
        start = time.perf_counter()
        self._forward(self._torch.tensor([prompt]), None)
        return time.perf_counter() - start, int(self._last[0, 0])

    def fill(self, prompts: Prompts) -> list[int]:
        """Run the first prompt and repeat its cache, in memory of its own, for every other row."""
        self._forward(self._torch.tensor(prompts[:1]), None)
        first = int(self._last[0, 0])
        self._cache.batch_repeat_interleave(len(prompts))
        self._last = self._last.repeat(len(prompts), 1)
        return [first]

    def decode(self, steps: int) -> list[float]:
        """Times of forward passes that each extend the cache by one token."""
        return _timed(lambda: self._forward(self._last, self._cache), steps)

    def _forward(self, ids: Any, cache: Any) -> None:
        with self._torch.inference_mode():
            out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._cache, self._last = out.past_key_values, out.logits[:, -1:].argmax(-1)


def _timed(step: Callable[[], Any], steps: int) -> list[float]:
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times[1:]


# ---- each side in a process of its own -------------------------------------------------------------------------------

_peer: Peer


def _open(ours: bool, ref: str, threads: int) -> None:
    """Start a side in this process, on `threads` CPUs where the system can pin a process."""
    global _peer
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    _peer = Ours(ref) if ours else Theirs(ref, threads)


def _call(method: str, *arguments: Any) -> Any:
    result = getattr(_peer, method)(*arguments)
    time.sleep(SETTLE)
    return result


class Side:
    """Calls a peer in its process and waits."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def call(self, method: str, *arguments: Any) -> Any:
        """What the peer's method returned."""
        return self._pool.submit(_call, method, *arguments).result()


@contextmanager
def sides(ref: str, threads: int) -> Iterator[tuple[Side, Side]]:
    """Both peers, loaded and warm."""
    spawn = get_context("spawn")
    with (
        ProcessPoolExecutor(1, spawn, _open, (True, ref, threads)) as ours,
        ProcessPoolExecutor(1, spawn, _open, (False, ref, threads)) as theirs,
    ):
        yield Side(ours), Side(theirs)
