"""`jaxinfer chat`: a conversation in the terminal."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.flags import DEMO, RefArgument, SamplingFlag, engine_config, sampling_params, takes, without
from jaxinfer.cli.source import ServerFlag, open_source, recommended, timing_line, utf8_input
from jaxinfer.config import EngineConfig
from jaxinfer.errors import Cancelled, Overloaded, RequestError, Unavailable
from jaxinfer.request import Delta, SamplingParams

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer_server.client import Client

with suppress(ImportError):  # line editing and history for input(), where the platform has it
    import readline  # noqa: F401

NOT_NOW = (RequestError, Overloaded, Unavailable, Cancelled)
"""What ends a turn and not the conversation."""
HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@takes(params=without(sampling_params, "n", "logprobs"), engine=engine_config)
def command(
    called: typer.Context,
    ref: RefArgument = DEMO,
    *,
    server: ServerFlag = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    sampling: SamplingFlag = "none",
    params: SamplingParams,
    engine: EngineConfig,
) -> None:
    """Talk with a model. Ctrl-C stops an answer; /reset forgets the conversation, /exit leaves.

    \b
    jaxinfer chat
    jaxinfer chat ./my-model --system "Answer in one sentence." --temperature 0.7
    jaxinfer chat --server localhost:50051
    """
    params = recommended(called, ref, server, sampling, params)
    with open_source(called, ref, engine, server, 1) as source:
        print(HELP, file=sys.stderr)
        Conversation(source, params, system).run()


class Conversation:
    """The messages so far; each turn adds what was said and what was answered."""

    def __init__(self, source: "LLM | Client", params: SamplingParams, system: str | None) -> None:
        self._source = source
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)

    def run(self) -> None:
        """Read turns until /exit or the end of the input."""
        while True:
            try:
                with utf8_input():
                    said = input(">>> ").strip()
            except KeyboardInterrupt:
                print(f"\n({HELP})")
                continue
            except EOFError:
                print()
                return
            if said in ("/exit", "/quit"):
                return
            self.turn(said)

    def turn(self, said: str) -> None:
        """Act on one line of input."""
        match said:
            case "":
                return
            case "/reset":
                self.messages = list(self._opening)
            case "/help":
                print(HELP)
            case _ if said.startswith("/"):
                print(f"{said.split()[0]} is no command; {HELP}")
            case _:
                self._ask(said)

    def _ask(self, said: str) -> None:
        """Print the answer as it is made. What Ctrl-C leaves of it stays in the conversation, as the reader saw it."""
        messages = [*self.messages, {"role": "user", "content": said}]
        answer, last = "", Delta(0)
        try:
            stream: Any = self._source.stream(messages, self._params)
            try:
                for last in stream:
                    print(last.text, end="", flush=True)
                    answer += last.text
            except KeyboardInterrupt:
                stream.close()
                print(" [stopped]", end="")
        except NOT_NOW as error:
            print(f"({error})")
            return
        print()
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        if last.finish is not None and last.usage is not None and last.timing is not None:
            print(timing_line(last.usage, [last.timing], last.finish), file=sys.stderr)
