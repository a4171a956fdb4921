"""The Python door: load a model, generate, stream, chat.

Knows: how a program calls the engine in its own thread. Starts no thread and no event loop.
"""

import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from jaxinfer.assembly import DEFAULT_ENGINE, Assembly, Messages, Prompt, assemble
from jaxinfer.config import EngineConfig
from jaxinfer.driver import Driver, Ticket
from jaxinfer.errors import EngineFault, RequestError
from jaxinfer.output import Output, failure
from jaxinfer.request import Delta, Sampling, SamplingParams


class TokenStream:
    """The deltas of one request as they are made. Dropping or closing it frees the request's slot and pages."""

    def __init__(self, driver: Driver, ticket: Ticket) -> None:
        self._driver = driver
        self._ticket = ticket
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while not self._closed:
            if self._ticket.deltas:
                return self._checked(self._ticket.deltas.popleft())
            if self._ticket.done:
                break
            self._driver.step()
        raise StopIteration

    def close(self) -> None:
        """Give the rest up; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._driver.give_up(self._ticket)

    def _checked(self, delta: Delta) -> Delta:
        if (error := failure(delta)) is not None:
            self.close()
            raise error
        return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


class LLM:
    """A loaded model that generates in the caller's thread.

    Several streams may be open at once, and `generate` may be called while one is: each step serves all of them.
    """

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.driver = Driver(assembly.loop, assembly.tokenizer)

    @classmethod
    def load(
        cls,
        ref: str,
        engine: EngineConfig = DEFAULT_ENGINE,
        *,
        progress: bool | None = None,
        sampling: Sampling = "none",
    ) -> Self:
        """Load and warm up the model that `ref` names: a directory, a .gguf file, `hf:org/name` or `demo`.

        `progress` draws bars on stderr; by default only where stderr is a terminal. `sampling="checkpoint"` makes what
        the checkpoint recommends the parameters of calls that give none: `llm.assembly.defaults`, to be varied with
        `dataclasses.replace`. Raises CheckpointError or ConfigError.
        """
        show = sys.stderr.isatty() if progress is None else progress
        return cls(assemble(ref, engine, progress=show, sampling=sampling))

    def generate(
        self, prompts: str | Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """One Output per prompt, in order; all prompts share the engine's batch as it drains.

        A prompt is text, a list of token ids or a list of chat messages; `params` is one for all or one each, by
        default the assembly's `defaults`. Every prompt is checked before the first is run. Raises RequestError, or
        EngineFault where the engine broke.
        """
        listed: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        each = _one_each(self.assembly.defaults if params is None else params, len(listed))
        jobs = [(None, [self.assembly.request(*pair)]) for pair in zip(listed, each, strict=True)]
        return [first_output(result) for _, result in self.driver.run_in_order(jobs, window=len(jobs))]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> TokenStream:
        """The deltas of one request, as they are made; joined, their text equals `generate`'s.

        Raises RequestError at once for bad input. With `params.n` above one, deltas of the choices interleave.
        """
        asked = self.assembly.defaults if params is None else params
        return TokenStream(self.driver, self.driver.submit(self.assembly.request(prompt, asked)))

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Output:
        """The answer to a conversation, through the checkpoint's own chat template."""
        return self.generate([messages], params)[0]


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} params for {count} prompts; expected one for all or one each")
    return params


def first_output(result: Sequence[Output] | RequestError | EngineFault) -> Output:
    """The output of a job of one request; raises the error that came in its place."""
    if isinstance(result, RequestError | EngineFault):
        raise result
    return result[0]
