"""`jaxinfer serve` as a process of its own, on real checkpoints: from text to text through the real door."""

import signal
import subprocess
import sys
from contextlib import contextmanager

from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.llm import LLM
from jaxinfer.request import FinishReason, SamplingParams
from jaxinfer_server.client import Client

CAPITAL = (504, 3575, 282, 4649, 314)
"""SmolLM2's ids of "The capital of France is"."""
PARIS = (7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34)
"""Its greedy continuation in float32, from an independent implementation (transformers on the decoded weights)."""


@contextmanager
def served(reference, *flags):
    """A server process; yields it and a client of it."""
    command = [sys.executable, "-m", "jaxinfer", "serve", str(reference), "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stdout if line.startswith("listening on "))
            with Client(line.split()[-1]) as client:
                client.wait_until_ready(300)
                yield server, client
        finally:
            server.kill()


def test_the_grpc_door_and_the_python_door_give_the_same_tokens(tiny_path):
    prompts = ["Once, on a river", [5, 6, 7], "안녕 🙂"]
    each = [
        SamplingParams(max_tokens=40, temperature=0.0),
        SamplingParams(max_tokens=40, seed=11, n=2, logprobs=1),
        SamplingParams(max_tokens=40, seed=12, top_p=0.8, repetition_penalty=1.3),
    ]
    flags = ("--slots", "4", "--context", "128", "--chunk", "64", "--page-size", "16", "--pages", "64")
    with served(tiny_path, *flags, "--deterministic") as (server, client):
        remote = client.generate(prompts, each)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    cache = CacheConfig(page_size=16, pages=64)
    llm = LLM.load(str(tiny_path), EngineConfig(slots=4, context=128, chunk=64, deterministic=True, cache=cache))
    for here, there in zip(llm.generate(prompts, each), remote, strict=True):
        assert here.prompt_token_ids == there.prompt_token_ids
        assert [c.token_ids for c in here.choices] == [c.token_ids for c in there.choices]
        assert [c.text for c in here.choices] == [c.text for c in there.choices]
        assert here.usage == there.usage


def test_the_demo_model_names_the_capital_of_france(demo_path):
    flags = ("--slots", "1", "--context", "128", "--chunk", "64", "--pages", "8")
    with served(demo_path, *flags) as (server, client):
        params = SamplingParams(max_tokens=len(PARIS), temperature=0.0)
        deltas = list(client.stream("The capital of France is", params))
        text = "".join(delta.text for delta in deltas)
        assert tuple(client.tokenize("The capital of France is")) == CAPITAL
        assert tuple(token for delta in deltas for token in delta.token_ids) == PARIS
        assert text == client.detokenize(PARIS)
        assert text.startswith(" Paris.")
        assert deltas[-1].finish is FinishReason.LENGTH
        chat = client.stream([{"role": "user", "content": "Say hi."}], SamplingParams(max_tokens=64, temperature=0.0))
        assert "".join(delta.text for delta in chat).strip()
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
