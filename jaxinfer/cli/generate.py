"""`jaxinfer generate`: one prompt in, its continuation out while it is being made."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.flags import DEMO, Ref, SamplingFlag, engine_config, sampling_params, takes
from jaxinfer.cli.source import ServerFlag, open_source, recommended, timing_line, utf8_input
from jaxinfer.config import EngineConfig
from jaxinfer.errors import RequestError
from jaxinfer.request import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer_server.client import Client


@takes(params=sampling_params, engine=engine_config)
def command(
    called: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The text to go on from; unset or -, standard input.")] = None,
    *,
    ref: Ref = DEMO,
    server: ServerFlag = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Answer as a chat model, or go on from the text.")] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when finished.")] = False,
    sampling: SamplingFlag = "none",
    params: SamplingParams,
    engine: EngineConfig,
) -> None:
    """Go on from a prompt, printing the text as it is made.

    A line with its timing goes to standard error.

    \b
    jaxinfer generate "The capital of France is" --temperature 0 --max-tokens 32
    jaxinfer generate --chat "Name three primary colours." --seed 7
    cat story.txt | jaxinfer generate --model ./my-model --stop "THE END"
    jaxinfer generate "Once upon a time" --server localhost:50051 --json --logprobs 3
    """
    if system is not None and not chat:
        raise RequestError("--system is a chat message; add --chat")
    if params.logprobs is not None and not as_json:
        raise RequestError("--logprobs are printed as JSON only; add --json")
    with utf8_input():
        text = sys.stdin.read() if prompt in (None, "-") else prompt
    params = recommended(called, ref, server, sampling, params)
    asked: Any = _messages(str(text), system) if chat else text
    with open_source(called, ref, engine, server, params.n) as source:
        if as_json or params.n > 1:
            _print_whole(source, asked, params, as_json=as_json)
        else:
            _print_stream(source, asked, params)


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _print_stream(source: "LLM | Client", prompt: Any, params: SamplingParams) -> None:
    for delta in source.stream(prompt, params):
        print(delta.text, end="", flush=True)
        if delta.finish is not None and delta.usage is not None and delta.timing is not None:
            print()
            print(timing_line(delta.usage, [delta.timing], delta.finish), file=sys.stderr)


def _print_whole(source: "LLM | Client", prompt: Any, params: SamplingParams, *, as_json: bool) -> None:
    from jaxinfer.batch.records import plain_body

    (output,) = source.generate([prompt], params)
    if as_json:
        print(json.dumps(plain_body(output), ensure_ascii=False))
    else:
        for choice in output.choices:
            print(f"--- {choice.index + 1} of {params.n} ({choice.finish.value})\n{choice.text}")
    timings = [choice.timing for choice in output.choices]
    print(timing_line(output.usage, timings, output.finish), file=sys.stderr)
