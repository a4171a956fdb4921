"""`jaxinfer bench`: how fast this machine serves a model, and how far that is from its roof."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

import typer
from tqdm import tqdm

from jaxinfer.cli.flags import DEMO, RefArgument, engine_config, takes
from jaxinfer.cli.json_text import json_text
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError


@takes(engine=engine_config)
def command(
    ref: RefArgument = DEMO,
    *,
    streams: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Streams at once; may be repeated.  [default: 1, 8, 32]")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt, drawn at random.")] = 128,
    output: Annotated[int, typer.Option(help="Tokens of each output; 2 or more.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    engine: EngineConfig,
) -> None:
    """Measure a model's speed beside its roofline bound.

    TTFT, TPOT, inter-token latency (ITL) and token rates at several numbers of streams.
    The machine's own bandwidth and matmul rate are measured first. A step is bound by compute or by memory; its
    arithmetic intensity (FLOPs a byte) against the machine's ridge says by which. The prefix cache is off.

    \b
    jaxinfer bench
    jaxinfer bench ./my-model --streams 1 --streams 64 --slots 64 --prompt 1024 --json
    """
    from jaxinfer.bench import bench, table
    from jaxinfer.llm import LLM

    counts = streams or [1, 8, 32]
    if min(counts) < 1 or prompt < 1 or output < 2:
        raise ConfigError(f"streams {counts}, prompt {prompt}, output {output}; expected at least 1, 1 and 2")
    if max(counts) > engine.slots:
        raise ConfigError(f"{max(counts)} streams; the engine has {engine.slots} slots, raise --slots")

    def shown(rows: Iterable[int]) -> Iterable[int]:
        return tqdm(rows, desc="bench", unit="run", disable=not sys.stderr.isatty())

    report = bench(LLM.load(ref, replace(engine, prefix_cache=False)), counts, prompt=prompt, output=output, rows=shown)
    print(json_text(report.as_json()) if as_json else table(report))
