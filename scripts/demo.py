"""Serve a model, ask it one question over gRPC, print the answer while it is made, and stop the server.

python scripts/demo.py                        # what `make demo` runs: SmolLM2-135M-Instruct
python scripts/demo.py ./my-model --prompt "Why is the sky blue?"
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from jaxinfer import SamplingParams
from jaxinfer.cli.source import timing_line
from jaxinfer_server.client import Client

PROMPT = "The capital of France is"
SMALL = ("--slots", "4", "--chunk", "128")  # fewer shapes to compile the first time
STOP_SECONDS = 30.0


@contextmanager
def serving(model: str) -> Iterator[str]:
    """Start `jaxinfer serve` on a free port; gives HOST:PORT when it takes requests, and drains it on leaving.

    Raises SystemExit where the server ends before it is ready; it has then said why on standard error.
    """
    command = [sys.executable, "-m", "jaxinfer", "serve", model, "--port", "0"]
    with subprocess.Popen([*command, *SMALL], stdout=subprocess.PIPE, text=True) as server:
        try:
            yield _wait_until_ready(server)
        finally:
            _stop(server)


def _stop(server: "subprocess.Popen[str]") -> None:
    """Let the server drain; end it where it takes too long."""
    server.terminate()
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()


def _wait_until_ready(server: "subprocess.Popen[str]") -> str:
    """The address out of the server's `listening on HOST:PORT`, once it has said `ready: NAME`."""
    assert server.stdout is not None
    address = ""
    for line in server.stdout:
        print(f"server: {line.strip()}", flush=True)
        if line.startswith("listening on "):
            address = line.removeprefix("listening on ").strip()
        elif line.startswith("ready"):
            return address
    raise SystemExit(f"the server ended with code {server.wait()} before it was ready")


def ask(target: str, prompt: str, params: SamplingParams) -> None:
    """Stream one answer to standard output, then a line with its counts and times."""
    print(f"\n{prompt}", end="", flush=True)
    with Client(target) as client:
        for delta in client.stream(prompt, params):
            print(delta.text, end="", flush=True)
            if delta.finish is not None and delta.usage is not None and delta.timing is not None:
                print(f"\n\n{timing_line(delta.usage, [delta.timing], delta.finish)}")


def main(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, hf:org/name, or demo.")] = "demo",
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = PROMPT,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to make.")] = 64,
) -> None:
    """Serve a model, stream one greedy answer over gRPC, stop."""
    print("starting a server; the first time it compiles, which can take a minute or two", flush=True)
    start = time.monotonic()
    with serving(model) as target:
        print(f"ready after {time.monotonic() - start:.1f} s")
        ask(target, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))


if __name__ == "__main__":
    typer.run(main)
