"""Perplexity of a model on a text, over windows that slide.

    perplexity(
        checkpoint, text, *, dtype="float32", kv_dtype=None, context=None, stride=None, tokens=None, mesh=None,
        report=None,
    ) -> Perplexity

The recipe is Hugging Face's "Perplexity of fixed-length models", so that figures can be compared: windows of `context`
tokens start `stride` tokens apart, and each scores only what no window before it has scored. Two points are ours. A BOS
that the model wants opens every window, as in training, and takes one of its `context` places; without a BOS nobody
can predict the text's first token, so it is not scored. And the mean is over the tokens that were scored, where the
page's code counts one less in every window.

Knows: windows, slices of logits, sums. The forward pass is the decoder's own, a chunk at a time over a pool of pages;
whatever `checkpoint.params` holds must be what `PagedOps` multiplies by, so quantised leaves are measured as they are.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int32

from jaxinfer.arrays import Pages
from jaxinfer.checkpoint.load import Checkpoint
from jaxinfer.config import KVDTypeName, MeshConfig, ModelConfig
from jaxinfer.engine.cache import make_pages, pages_per_sequence
from jaxinfer.engine.ops import PagedOps
from jaxinfer.engine.runner import in_bytes
from jaxinfer.engine.sharding import make_mesh
from jaxinfer.errors import CheckpointError, ConfigError, RequestError
from jaxinfer.model.ops import Ops, TokenBatch
from jaxinfer.model.quantised import bytes_per_weight
from jaxinfer.model.transformer import Transformer
from jaxinfer.progress import Report
from jaxinfer.roofline import Cost, prefill_cost

CONTEXT = 1_024
PAGE = 64
CHUNK = 512
LOGIT_BYTES = 64 * 2**20
"""Of one slice of logits: all of a chunk at once would be 512 MiB with Gemma's 262,144 words."""
UNSCORED = -1


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens `begin` to `end` of the text, of which those from `first` on are scored; nll: their sum, in nats."""

    begin: int
    first: int
    end: int
    nll: float = 0.0

    @property
    def scored(self) -> int:
        """Tokens that this window scores."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Perplexity:
    """How well a model predicts a text; `bytes` are those that the scored tokens stand for.

    seconds: of the forward passes, without loading and compiling. cost: what they had to compute and read, at least.
    """

    windows: tuple[Window, ...]
    context: int
    stride: int
    bytes: int
    seconds: float
    cost: Cost

    @property
    def tokens(self) -> int:
        """Tokens scored, each once."""
        return sum(window.scored for window in self.windows)

    @property
    def nll(self) -> float:
        """Negative log-likelihood of all scored tokens, in nats."""
        return math.fsum(window.nll for window in self.windows)

    @property
    def perplexity(self) -> float:
        """exp of the mean loss per token; infinite where that passes the largest float."""
        mean = self.nll / self.tokens
        return math.exp(mean) if mean < 709 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """The loss per byte of text, which does not depend on the tokenizer."""
        return self.nll / math.log(2) / self.bytes


def perplexity(
    checkpoint: Checkpoint,
    text: str,
    *,
    dtype: str = "float32",
    kv_dtype: KVDTypeName | None = None,
    context: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    mesh: Mesh | None = None,
    report: Report | None = None,
) -> Perplexity:
    """Score `text`, or its first `tokens` tokens, with a model whose weights were loaded in `dtype`.

    kv_dtype: of the cache; unset, `dtype`. context: tokens of a window; unset, 1,024 or the model's own where that is
    less. stride: tokens from one window to the next; unset, half of what a window takes of the text. mesh: where the
    parameters lie; unset, one device. Control tokens spelled out in the text are plain text. Raises RequestError for a
    text of too few tokens, ConfigError for windows that the model cannot hold or that would leave tokens out,
    CheckpointError where a loss is not finite.
    """
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    if tokens is not None and tokens < 2:
        raise RequestError(f"tokens is {tokens}; expected 2 or more")
    ids = tokenizer.encode(text, bos=False)[:tokens]
    opening = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    context = min(CONTEXT, config.context) if context is None else context
    stride = max(1, (context - len(opening)) // 2) if stride is None else stride
    _check(config, len(ids), context, stride, len(opening))
    windows = list(slide(len(ids), context - len(opening), stride, unscored=1 - len(opening)))
    size = min(context, max(window.end - window.begin for window in windows) + len(opening))
    mesh, held = mesh or make_mesh(MeshConfig()), kv_dtype or dtype
    pages = make_pages(config, pages_per_sequence(PAGE, size), PAGE, held, mesh)
    step = scoring_step(replace(config, context=context), dtype, held, mesh)
    scorer = _Scorer(step, checkpoint.params, pages, report)
    began, scored, done = time.perf_counter(), [], 0
    for window in windows:
        losses = scorer.losses([*opening, *ids[window.begin : window.end]], window.first - window.begin + len(opening))
        scored.append(replace(window, nll=_total(losses, window)))
        done += window.scored
        if report:
            report("evaluate", done, len(ids))
    return Perplexity(
        windows=tuple(scored),
        context=context,
        stride=stride,
        bytes=sum(len(tokenizer.token_bytes(token)) for token in ids[windows[0].first :]),
        seconds=time.perf_counter() - began,
        cost=_cost(
            config,
            windows,
            len(opening),
            dtype_bytes=jnp.dtype(dtype).itemsize,
            kv_dtype_bytes=jnp.dtype(held).itemsize,
            weight_bytes=bytes_per_weight(checkpoint.params),
        ),
    )


def slide(tokens: int, size: int, stride: int, *, unscored: int) -> Iterator[Window]:
    """Windows of `size` over `tokens`, `stride` apart, up to the first that reaches the end.

    unscored: tokens at the head of a window that have nothing before them to be predicted from: 1, or 0 behind a BOS.
    """
    scored = 0
    for begin in range(0, tokens, stride):
        end = min(begin + size, tokens)
        yield Window(begin, max(scored, begin + unscored), end)
        scored = end
        if end == tokens:
            return


def _check(config: ModelConfig, tokens: int, context: int, stride: int, opening: int) -> None:
    if not 2 <= context <= config.context:
        raise ConfigError(f"context is {context}; expected 2 to the model's {config.context} tokens")
    if not 1 <= stride <= context - opening:
        raise ConfigError(
            f"stride is {stride}; expected 1 to {context - opening}, the tokens of the text that a window of {context} "
            "holds: a longer one would leave tokens out"
        )
    if tokens < 2:
        raise RequestError(f"the text has {tokens} tokens; expected 2 or more")


def _total(losses: Float32[np.ndarray, " n"], window: Window) -> float:
    """The sum in float64. Raises CheckpointError where a loss is not finite, naming the token."""
    if not np.isfinite(losses).all():
        token = window.first + int(np.flatnonzero(~np.isfinite(losses))[0])
        raise CheckpointError(f"the loss of token {token} is not finite; jaxinfer doctor finds the cause")
    return float(losses.sum(dtype=np.float64))


def _cost(config: ModelConfig, windows: Sequence[Window], opening: int, **sizes: Any) -> Cost:
    """What the chunks of all windows take by the roofline, with `sizes` as for `prefill_cost`; the logits are those of
    the scored tokens.
    """
    cost = Cost(0.0, 0.0)
    for window in windows:
        length = window.end - window.begin + opening
        for start in range(0, length, CHUNK):
            tokens = min(CHUNK, length - start)
            cost += prefill_cost(config, tokens, start=start, **sizes)
        cost += Cost(2.0 * config.width * config.vocab_size * window.scored, 0.0)
    return cost


class _Scorer:
    """One compiled step and the pool that it runs over, which holds the longest window, its BOS included."""

    def __init__(self, step: Any, params: Any, pages: tuple[Pages, ...], report: Report | None) -> None:
        count = jax.tree.leaves(pages)[0].shape[0]
        self._params = in_bytes(params)
        self._chunk = min(CHUNK, count * PAGE)
        self._table = np.arange(count, dtype=np.int32)[None]
        self._pages = pages
        if report:
            report("compile", 0, 1)
        self._step = step.lower(self._params, self._pages, *self._rows([0], 0, 1)).compile()
        if report:
            report("compile", 1, 1)

    def losses(self, ids: Sequence[int], first: int) -> Float32[np.ndarray, " n"]:
        """Loss of each of `ids` from `first` on, given all that stand before it."""
        found = []
        for start in range(0, len(ids), self._chunk):
            loss, self._pages = self._step(self._params, self._pages, *self._rows(ids, start, first))
            found.append(loss)
        return np.concatenate([np.asarray(loss) for loss in found])[first - 1 : len(ids) - 1]

    def _rows(self, ids: Sequence[int], start: int, first: int) -> tuple[TokenBatch, Int32[np.ndarray, " t"]]:
        """The chunk of `ids` at `start`, padded, and the id that each of its tokens is to predict."""
        count = min(self._chunk, len(ids) - start)
        tokens, positions = np.zeros((1, self._chunk), np.int32), np.full((1, self._chunk), -1, np.int32)
        tokens[0, :count] = ids[start : start + count]
        positions[0, :count] = np.arange(start, start + count)
        targets = np.full(self._chunk, UNSCORED, np.int32)
        low = max(first - 1 - start, 0)
        wanted = ids[start + low + 1 : start + count + 1]
        targets[low : low + len(wanted)] = wanted
        row: Any = tokens, positions, self._table, np.array([start + count], np.int32)
        return TokenBatch(*row), targets


def scoring_step(config: ModelConfig, dtype: str, held: str, mesh: Mesh) -> Any:
    """`_chunk_losses` of a model whose parameters and pages, of dtype `held`, lie on `mesh`; jitted."""
    ops = PagedOps.of_model(config, held, mesh)
    step = partial(_chunk_losses, model=Transformer(config, jnp.dtype(dtype)), ops=ops)
    return jax.jit(step, donate_argnames="pages")


def _chunk_losses(
    params: Any,
    pages: tuple[Pages, ...],
    batch: TokenBatch,
    targets: Int32[Array, " t"],
    *,
    model: Transformer,
    ops: Ops,
) -> tuple[Float32[Array, " t"], tuple[Pages, ...]]:
    """Loss of each target, 0 where it is UNSCORED, and the pool with this chunk's keys. DONATES pages."""
    forward: Any = model.apply({"params": params}, batch, pages, ops)
    hidden, written = forward
    rows = slice_rows(targets.size, model.config.vocab_size)

    def losses(part: tuple[Float[Array, "r w"], Int32[Array, " r"]]) -> Float32[Array, " r"]:
        inputs, wanted = part
        logits: Any = model.apply({"params": params}, inputs, ops, method="logits")
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(wanted, 0))
        return jnp.where(wanted == UNSCORED, 0.0, loss)

    def part_losses(part: tuple[Float[Array, "r w"], Int32[Array, " r"]]) -> Float32[Array, " r"]:
        nothing = jnp.zeros(rows, jnp.float32)
        return jax.lax.cond(jnp.any(part[1] != UNSCORED), losses, lambda _: nothing, part)

    parts = hidden[0].reshape(-1, rows, hidden.shape[-1]), targets.reshape(-1, rows)
    return jax.lax.map(part_losses, parts).reshape(-1), written


def slice_rows(tokens: int, vocab_size: int) -> int:
    """Tokens whose logits are made together: a power of two that divides `tokens`, within LOGIT_BYTES of float32."""
    fit = max(1, LOGIT_BYTES // (4 * vocab_size))
    return math.gcd(tokens, 2 ** (fit.bit_length() - 1))
