"""A tiny random model and the plans that run it, for every test of this folder."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig
from jaxinfer.engine.runner import EngineRunner
from jaxinfer.model.transformer import init_params
from jaxinfer.plan import DecodeRow, PrefillChunk, RowParams, Seat, StepPlan
from jaxinfer.request import SampledToken, SamplingParams

MODEL = ModelConfig(
    family="llama",
    vocab_size=300,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=64,
    context=128,
    query_scale=8**-0.5,
)
VOCAB = 290  # the tokenizer's; ids from there up pad the model's vocabulary
ENGINE = EngineConfig(slots=4, chunk=32, deterministic=True, cache=CacheConfig(page_size=8, pages=48))
GREEDY = SamplingParams(temperature=0, logprobs=20)


def make_runner(engine: EngineConfig = ENGINE, *, seed: int = 0) -> EngineRunner:
    params = init_params(MODEL, jnp.float32, jax.random.key(seed))
    # Random embeddings give near-uniform logits; ten times larger ones tell tokens apart.
    params["head"] = params["head"] * 10
    runner = EngineRunner.build(MODEL, params, engine, vocab_size=VOCAB)
    runner.warm_up()
    return runner


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 101 + 7 * i * i + 13 * i) % VOCAB for i in range(length)]


def row_params(params: SamplingParams, *, seed: int = 11, choice: int = 0, ban: frozenset[int] = frozenset()):
    return RowParams(params, seed, choice, ban, bool(ban))


class Seq:
    """One sequence: its slot, its own pages, and the plans that move it on."""

    def __init__(self, ids: Sequence[int], slot: int, params: SamplingParams = GREEDY, **row) -> None:
        self.ids, self.slot, self.params, self.how = list(ids), slot, params, row_params(params, **row)
        self.pages = list(range(slot * 12, slot * 12 + 12))
        self.length = 0

    def seat(self, output: Sequence[int] = ()) -> Seat:
        return Seat(self.slot, self.ids, output, self.params.logit_bias)

    def chunk(self, count: int | None = None) -> PrefillChunk:
        start, end = self.length, len(self.ids) if count is None else self.length + count
        self.length = end
        return PrefillChunk(self.slot, self.ids[start:end], start, self.pages, end == len(self.ids), self.how)

    def decode(self) -> DecodeRow:
        self.length += 1
        return DecodeRow(self.slot, self.length - 1, self.pages, self.how)


def run(runner: EngineRunner, plan: StepPlan) -> tuple[SampledToken, ...]:
    tokens = runner.fetch(runner.dispatch(plan))
    return (*tokens.prefills, *tokens.decodes)


def generate(
    runner: EngineRunner, sequences: Sequence[Seq], steps: int, *, chunks: Sequence[int | None] = (None,)
) -> list[list[SampledToken]]:
    """Prefill each sequence in these chunks, decode all of them together; the tokens of each."""
    for sequence in sequences:
        if sequence.params.needs_history:
            run(runner, StepPlan(seats=(sequence.seat(),)))
    made: list[list[SampledToken]] = [[] for _ in sequences]
    for count in chunks:
        for tokens, sequence in zip(made, sequences, strict=True):
            tokens.extend(run(runner, StepPlan(prefills=(sequence.chunk(count),))))
    for _ in range(steps):
        row = run(runner, StepPlan(decodes=tuple(sequence.decode() for sequence in sequences)))
        for tokens, token in zip(made, row, strict=True):
            tokens.append(token)
    return made


def ids(tokens: Sequence[SampledToken]) -> list[int]:
    return [token.token for token in tokens]
