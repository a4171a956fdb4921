"""Choosing the next token of each row from its logits.

The order is bias -> penalties -> banned stops -> temperature -> top-k -> top-p -> min-p -> draw. Bias before penalties
is vLLM's order; temperature, top-k, top-p, min-p is that of Hugging Face's generate, so that top-p measures what top-k
left. Tokens that tie at a threshold are all kept: which of two equals a sort would drop is an accident.

Knows: per-row parameter arrays. Branches on no value in Python: a part that no row asks for is skipped by `lax.cond`.
There is no sort over the vocabulary ([32, 49152] takes 100 ms on CPU): thresholds are found by bisection. Rows never
touch each other, so a row's token does not depend on its neighbours.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxinfer.arrays import Logits, RowBool, RowFloat, RowInt, RowKey, Slots, StopIds
from jaxinfer.engine.state import History
from jaxinfer.request import MAX_LOGPROBS

BLOCK = 256
"""Tokens that the draw sums up before it looks at single ones."""

Packed = Int32[Array, "s packed"]
"""2 + 2x columns: token (-1: broken), its log-probability's bits, x best ids, their log-probabilities' bits."""


class SampleRows(NamedTuple):
    """How each row chooses its token; a padding row is greedy and asks for nothing."""

    greedy: RowBool
    temperature: RowFloat
    top_k: RowInt
    """0 keeps all."""
    top_p: RowFloat
    min_p: RowFloat
    repetition: RowFloat
    presence: RowFloat
    frequency: RowFloat
    history: RowBool
    """True where the slot was seated with a history, and so penalties or biases apply."""
    ban_stops: RowBool
    stop_ids: StopIds
    """Padded with v."""
    seed: RowKey
    """High and low half of the 63-bit seed."""
    choice: RowInt
    position: RowInt
    """Position of the token that is being chosen."""
    logprobs: RowBool


def sample(logits: Logits, history: History, slots: Slots, rows: SampleRows) -> Packed:
    """One token per row, with the log-probabilities of rows that ask for them.

    A row whose logits hold NaN or +inf, or nothing above -inf, gets token -1 and harms no other row.
    """
    adjusted = _ban_stops(_penalise(logits, history, slots, rows), rows)
    best = jnp.max(adjusted, axis=-1)
    greedy = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    drawn = lax.cond(jnp.all(rows.greedy), lambda: greedy, lambda: _draw(adjusted, best, rows))
    token = jnp.where(jnp.isfinite(best), jnp.where(rows.greedy, greedy, drawn), -1)
    return jnp.concatenate([token[:, None], _logprobs(logits, token, rows)], axis=1)


# ---- logits ----------------------------------------------------------------------------------------------------------


def _penalise(logits: Logits, history: History, slots: Slots, rows: SampleRows) -> Logits:
    def apply() -> Logits:
        seated = History(*(whole.at[slots].get(mode="clip") for whole in history))
        return jnp.where(rows.history[:, None], penalise(logits, seated, rows), logits)

    return lax.cond(jnp.any(rows.history), apply, lambda: logits)


def penalise(logits: Logits, history: History, rows: SampleRows) -> Logits:
    """Add biases; then repetition divides positive and multiplies negative logits; then presence and frequency."""
    logits = logits + history.bias
    made = history.counts > 0
    repetition = rows.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(made | history.in_prompt, repeated, logits)
    return logits - made * rows.presence[:, None] - history.counts * rows.frequency[:, None]


def _ban_stops(logits: Logits, rows: SampleRows) -> Logits:
    def apply() -> Logits:
        ids = jnp.where(rows.ban_stops[:, None], rows.stop_ids, logits.shape[1])
        return jax.vmap(lambda row, banned: row.at[banned].set(-jnp.inf, mode="drop"))(logits, ids)

    return lax.cond(jnp.any(rows.ban_stops), apply, lambda: logits)


# ---- filters ---------------------------------------------------------------------------------------------------------


def _ordered(x: Float32[Array, " s"]) -> RowInt:
    """Integers that compare as the floats do."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _unordered(x: RowInt) -> Float32[Array, " s"]:
    return lax.bitcast_convert_type(jnp.where(x < 0, x ^ 0x7FFFFFFF, x), jnp.float32)


def highest_threshold(
    kept: Callable[[Float32[Array, " s"]], Array], goal: Array, low: Float32[Array, " s"], high: Float32[Array, " s"]
) -> Float32[Array, " s"]:
    """Per row the highest t in low..high with kept(t) >= goal, where kept falls as t rises and kept(low) >= goal.

    Bisection on the floats' bit patterns: exact after 32 passes. A row stops early where kept(t) is the goal itself: t
    may then not be the highest, but it keeps the same tokens.
    """

    def open_rows(bounds: tuple[RowInt, RowInt]) -> Array:
        return jnp.any(bounds[0] + 1 < bounds[1])

    def halve(bounds: tuple[RowInt, RowInt]) -> tuple[RowInt, RowInt]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # the sum itself could overflow
        found = kept(_unordered(middle))
        enough = found >= goal
        low, high = jnp.where(enough, middle, low), jnp.where(enough, high, middle)
        return low, jnp.where(found == goal, low + 1, high)

    return _unordered(lax.while_loop(open_rows, halve, (_ordered(low), _ordered(high) + 1))[0])


def keep_top_k(logits: Logits, top_k: RowInt) -> Logits:
    """-inf for every token below the k-th highest; k = 0 or k > v keeps all."""

    def apply() -> Logits:
        low = jnp.full(top_k.shape, -jnp.inf)
        filtered = (top_k > 0) & (top_k < logits.shape[1])
        high = jnp.where(filtered, jnp.max(logits, axis=-1), low)  # low = high: nothing to search for
        cut = highest_threshold(lambda t: jnp.sum(logits >= t[:, None], axis=-1, dtype=jnp.int32), top_k, low, high)
        return jnp.where(logits >= cut[:, None], logits, -jnp.inf)

    return lax.cond(jnp.any(top_k > 0), apply, lambda: logits)


def keep_top_p(weights: Float32[Array, "s v"], top_p: RowFloat) -> Float32[Array, "s v"]:
    """0 for every token outside the fewest, heaviest ones that hold top_p of the sum; the heaviest weighs 1."""

    def apply() -> Float32[Array, "s v"]:
        goal = top_p * jnp.sum(weights, axis=-1)
        low, high = jnp.zeros_like(top_p), jnp.where(top_p < 1, 1.0, 0.0)  # low = high: nothing to search for
        cut = highest_threshold(
            lambda t: jnp.sum(jnp.where(weights >= t[:, None], weights, 0), axis=-1), goal, low, high
        )
        return jnp.where(weights >= cut[:, None], weights, 0)

    return lax.cond(jnp.any(top_p < 1), apply, lambda: weights)


# ---- draw ------------------------------------------------------------------------------------------------------------


def _uniform(rows: SampleRows) -> RowFloat:
    """One number in [0, 1) per row, of (seed, choice, position) alone: batching and restarts cannot change it."""

    def one(seed: Array, choice: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, choice), position))

    return jax.vmap(one)(rows.seed, rows.choice, rows.position)


def _draw(logits: Logits, best: RowFloat, rows: SampleRows) -> RowInt:
    sampled = ~rows.greedy
    logits = keep_top_k(logits, jnp.where(sampled, rows.top_k, 0))
    # The difference first: a tiny temperature alone would make every logit infinite.
    scale = jnp.maximum(rows.temperature, jnp.finfo(jnp.float32).tiny)
    weights = jnp.exp((logits - best[:, None]) / scale[:, None])
    weights = keep_top_p(weights, jnp.where(sampled, rows.top_p, 1))
    weights = jnp.where(weights >= rows.min_p[:, None], weights, 0)
    return invert_cdf(weights, _uniform(rows))


def _first_above(weights: Float32[Array, "s n"], target: RowFloat) -> tuple[RowInt, RowFloat]:
    """Index of the first positive weight at which the running sum passes `target`, and the sum before it.

    Rounding may leave the last sum at or below the target: the last positive weight is then taken.
    """
    sums = jnp.cumsum(weights, axis=-1)
    passed = (sums > target[:, None]) & (weights > 0)
    last = weights.shape[1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    index = jnp.where(jnp.any(passed, axis=-1), jnp.argmax(passed, axis=-1), last).astype(jnp.int32)
    before = jnp.where(index > 0, jnp.take_along_axis(sums, jnp.maximum(index - 1, 0)[:, None], axis=1)[:, 0], 0)
    return index, before


def invert_cdf(weights: Float32[Array, "s v"], uniform: RowFloat) -> RowInt:
    """The token at which the running sum of weights passes uniform * sum; never one of weight 0.

    In two levels, blocks and tokens of one block: one long running sum takes ten times as long.
    """
    rows, size = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -size % BLOCK))).reshape(rows, -1, BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    target = uniform * jnp.sum(sums, axis=-1)
    block, before = _first_above(sums, target)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token, _ = _first_above(inside, target - before)
    return block * BLOCK + token


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def _logprobs(logits: Logits, token: RowInt, rows: SampleRows) -> Int32[Array, "s bits"]:
    """Log-softmax of the raw logits: of the token, and the MAX_LOGPROBS best (ids -1 where the vocabulary ends)."""
    best = min(MAX_LOGPROBS, logits.shape[1])

    def bits(x: Float32[Array, "s n"]) -> Int32[Array, "s n"]:
        return lax.bitcast_convert_type(x, jnp.int32)

    def apply() -> Int32[Array, "s bits"]:
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        chosen = jnp.take_along_axis(logits, jnp.maximum(token, 0)[:, None], axis=1) - total
        values, ids = lax.top_k(logits, best)
        missing = ((0, 0), (0, MAX_LOGPROBS - best))
        ids = jnp.pad(ids.astype(jnp.int32), missing, constant_values=-1)
        return jnp.concatenate([bits(chosen), ids, bits(jnp.pad(values - total, missing))], axis=1)

    skip = jnp.zeros((logits.shape[0], 1 + 2 * MAX_LOGPROBS), jnp.int32)
    return lax.cond(jnp.any(rows.logprobs), apply, lambda: skip)
