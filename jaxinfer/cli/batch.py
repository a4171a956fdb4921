"""`jaxinfer batch`: JSON lines in, JSON lines out."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxinfer.cli.flags import DEMO, Ref, SamplingFlag, engine_config, sampling_params, takes
from jaxinfer.cli.source import recommended
from jaxinfer.config import EngineConfig
from jaxinfer.request import SamplingParams

SOME_FAILED = 3


@takes(params=sampling_params, engine=engine_config)
def command(
    called: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="JSON lines; - is standard input.")],
    target: Annotated[Path, typer.Argument(metavar="OUTPUT", help="JSON lines; - is standard output.")],
    *,
    ref: Ref = DEMO,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew, whatever OUTPUT holds.")] = False,
    progress: Annotated[bool, typer.Option(help="Show a bar on standard error.")] = True,
    sampling: SamplingFlag = "none",
    params: SamplingParams,
    engine: EngineConfig,
) -> None:
    """Answer every line of a file, in order. Run it again after a crash: it goes on where it stopped.

    A line is plain, {"prompt": ..., "id": ...} or {"messages": [...], "id": ...}, with any sampling field beside it; or
    an OpenAI batch line, {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}. What a
    line leaves out comes from the flags. A bad line gets a record with its `error`, in its place. OUTPUT.job remembers
    what began OUTPUT: an input that has changed since is refused. Exit code 3: finished, and some lines failed.

    \b
    jaxinfer batch prompts.jsonl answers.jsonl --temperature 0 --max-tokens 64
    jaxinfer batch requests.jsonl results.jsonl --model ./my-model --slots 64
    echo '{"prompt": "Hello"}' | jaxinfer batch - -
    """
    from jaxinfer.batch.job import run_file, run_pipe
    from jaxinfer.llm import LLM

    def load() -> LLM:
        return LLM.load(ref, engine)

    params = recommended(called, ref, None, sampling, params)
    answer = run_pipe if "-" in (str(source), str(target)) else run_file
    try:
        summary = answer(load, ref, source, target, params, overwrite=overwrite, progress=progress)
    except KeyboardInterrupt:
        print(f"stopped; what is in {target} stays, and the same command goes on", file=sys.stderr)
        raise
    if summary.failed:
        print(f"{summary.failed} of {summary.lines} lines failed; see their error", file=sys.stderr)
        raise typer.Exit(SOME_FAILED)
