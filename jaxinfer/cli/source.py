"""Where a command's tokens come from: a model loaded here, or a server.

Knows: how either is opened, and how a finished answer is summed up in one line.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.flags import engine_config
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.request import FinishReason, Sampling, SamplingParams, Timing, Usage

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer_server.client import Client

ServerFlag = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Ask this server instead of loading a model; needs no JAX.")
]


@contextmanager
def open_source(
    called: typer.Context, ref: str, engine: EngineConfig, server: str | None, choices: int
) -> Iterator["LLM | Client"]:
    """The model `ref` in this process, or the client of `server`; both generate and stream alike.

    Without --slots, a model here gets a slot for each of `choices`: the fewer there are, the fewer shapes are compiled.
    Raises ConfigError where flags for a model here come with a server.
    """
    if server is None:
        from jaxinfer.llm import LLM

        yield LLM.load(ref, engine if _given(called, "slots") else replace(engine, slots=choices))
        return
    if flags := [spelled for name, spelled in _own_flags(called).items() if _given(called, name)]:
        raise ConfigError(f"{flags[0]} is the server's own business; with --server, leave it out")
    from jaxinfer_server.client import Client

    with Client(server) as client:
        yield client


def recommended(
    called: typer.Context, ref: str, server: str | None, choice: Sampling, params: SamplingParams
) -> SamplingParams:
    """`params` with what the checkpoint `ref` recommends for the flags that the command line leaves out, if so chosen.

    Raises CheckpointError as loading does.
    """
    if choice == "none" or server is not None:  # with a server, `open_source` refuses the flag
        return params
    from jaxinfer.checkpoint.load import load_generation

    sampling = load_generation(ref).sampling
    return replace(params, **{name: value for name, value in sampling.items() if not _given(called, name)})  # pyright: ignore[reportArgumentType]


def _own_flags(called: typer.Context) -> dict[str, str]:
    """The parameters that only a model in this process has, and how a person spells them."""
    own = [
        p for p in called.command.params if p.name in ("ref", "sampling", *inspect.signature(engine_config).parameters)
    ]
    return {str(p.name): p.opts[0] if p.opts[0].startswith("-") else "REF" for p in own}


def _given(called: typer.Context, name: str) -> bool:
    """True where the command line sets the parameter, be it to its default."""
    source = called.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


@contextmanager
def utf8_input() -> Iterator[None]:
    """While standard input is read: raises RequestError where it is no UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is no UTF-8 text: {error.reason} at byte {error.start}") from None


def timing_line(usage: Usage, timings: Sequence[Timing], finish: FinishReason) -> str:
    """One line for people: tokens, time to the first, time per token after it, and their rate over all of it."""
    ttft = min(timing.ttft for timing in timings)
    gaps = [gap for timing in timings for gap in timing.itl]
    whole = max(timing.ttft + sum(timing.itl) for timing in timings)
    tpot = f"{1000 * sum(gaps) / len(gaps):.1f} ms" if gaps else "-"
    rate = usage.completion_tokens / whole if whole > 0 else 0.0
    return (
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens ({usage.cached_tokens} cached) | "
        f"TTFT {1000 * ttft:.0f} ms | TPOT {tpot} | {rate:.1f} tok/s | {finish.value}"
    )
