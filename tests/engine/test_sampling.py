"""Choosing tokens: equal to plain numpy that sorts, whatever the neighbours."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxinfer.engine.sampling import SampleRows, invert_cdf, keep_top_k, keep_top_p, penalise, sample
from jaxinfer.engine.state import History
from jaxinfer.request import MAX_LOGPROBS, MAX_STOP_IDS

S, V = 4, 300

DEFAULTS = {
    "greedy": False,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition": 1.0,
    "presence": 0.0,
    "frequency": 0.0,
    "history": False,
    "ban_stops": False,
    "choice": 0,
    "position": 0,
    "logprobs": False,
}
KINDS = {bool: np.bool_, float: np.float32, int: np.int32}
jit_sample = jax.jit(sample)
jit_top_k, jit_top_p, jit_invert = jax.jit(keep_top_k), jax.jit(keep_top_p), jax.jit(invert_cdf)


def make_rows(rows=S, seed=(0, 7), stop_ids=(), **fields) -> SampleRows:
    """Rows of the defaults, with a value or one value per row for each field given."""
    columns = {
        name: np.broadcast_to(np.asarray(fields.get(name, value), KINDS[type(value)]), (rows,))
        for name, value in DEFAULTS.items()
    }
    stops = np.full((rows, MAX_STOP_IDS), V, np.int32)
    stops[:, : len(stop_ids)] = stop_ids
    seeds = np.broadcast_to(np.asarray(seed, np.uint32), (rows, 2))
    return SampleRows(**columns, stop_ids=stops, seed=seeds)


@cache
def no_history(vocab=V) -> History:
    return History(jnp.zeros((S, vocab), bool), jnp.zeros((S, vocab), jnp.int32), jnp.zeros((S, vocab)))


def choose(logits, *, history=None, slots=range(S), **fields) -> np.ndarray:
    """[rows] tokens for `logits` [v] (the same for every row) or [rows, v]."""
    logits = np.broadcast_to(np.asarray(logits, np.float32), (S, np.shape(logits)[-1]))
    history = no_history(logits.shape[1]) if history is None else history
    return np.asarray(jit_sample(logits, history, np.asarray(slots, np.int32), make_rows(**fields)))[:, 0]


def some_logits(seed=0, scale=3.0, rows=None) -> np.ndarray:
    shape = V if rows is None else (rows, V)
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


# Few distinct values, so that ties are common; and any finite ones.
TIES = arrays(np.float32, (S, V), elements=st.sampled_from([np.float32(x) for x in (-3, -0.0, 0, 0.25, 1, 1.5, 7)]))
ANY = arrays(np.float32, (S, V), elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False))
LOGITS = st.one_of(TIES, ANY)


# ---- greedy ----------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_of_the_highest():
    logits = np.zeros(V, np.float32)
    logits[[17, 203, 256]] = 5
    assert choose(logits, greedy=True).tolist() == [17] * S


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}, {"temperature": 1e-30}])
def test_the_narrowest_filter_is_greedy(fields):
    for seed in range(5):
        logits = some_logits(seed, rows=S)
        assert (choose(logits, **fields, position=seed) == logits.argmax(1)).all()


def test_a_greedy_row_stays_greedy_beside_sampled_ones():
    logits = some_logits(1)
    tokens = {tuple(choose(logits, greedy=[False, True, False, True], temperature=5.0, position=i)) for i in range(20)}
    assert {t[1] for t in tokens} == {t[3] for t in tokens} == {logits.argmax()}
    assert len({t[0] for t in tokens}) > 3


# ---- filters ---------------------------------------------------------------------------------------------------------


@given(logits=LOGITS, k=st.lists(st.integers(0, V + 1), min_size=S, max_size=S))
def test_top_k_keeps_what_a_sort_would_keep(logits, k):
    kept = np.asarray(jit_top_k(logits, np.array(k, np.int32)))
    for row, out, count in zip(logits, kept, k, strict=True):
        cut = np.sort(row)[::-1][count - 1] if 0 < count < V else -np.inf
        np.testing.assert_array_equal(out, np.where(row >= cut, row, -np.inf))


def nucleus(weights: np.ndarray, p: float) -> np.ndarray:
    """Mask of the fewest, heaviest weights that hold p of the sum, in float64, ties at the edge included."""
    descending = np.sort(weights.astype(np.float64))[::-1]
    enough = np.cumsum(descending) >= p * descending.sum()
    return weights >= descending[np.argmax(enough)]


@given(logits=LOGITS, p=st.lists(st.floats(1e-6, 0.9999), min_size=S, max_size=S))
def test_top_p_keeps_what_a_sort_would_keep(logits, p):
    """Up to the rounding of float32 sums: between the nuclei of a slightly smaller and a slightly larger p."""
    weights = np.exp(logits - logits.max(1, keepdims=True))
    kept = np.asarray(jit_top_p(weights, np.array(p, np.float32)))
    for row, out, mass in zip(weights, kept, p, strict=True):
        np.testing.assert_array_equal(out[out > 0], row[out > 0])
        assert (nucleus(row, mass - 1e-5) <= (out > 0) | (row == 0)).all()
        assert ((out > 0) <= nucleus(row, mass + 1e-5)).all()


def test_top_p_of_one_and_top_k_of_zero_keep_everything_beside_filtered_rows():
    logits = some_logits(2, rows=S)
    kept = np.asarray(jit_top_k(logits, np.array([0, 5, V, V + 1], np.int32)))
    np.testing.assert_array_equal(kept[[0, 2, 3]], logits[[0, 2, 3]])
    weights = np.exp(logits - logits.max(1, keepdims=True))
    kept = np.asarray(jit_top_p(weights, np.array([1, 0.5, 1, 0.9], np.float32)))
    np.testing.assert_array_equal(kept[[0, 2]], weights[[0, 2]])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": 3}, {10, 20, 30}),
        ({"top_p": 0.7}, {10, 20}),  # 0.5 + 0.25 pass 0.7
        ({"min_p": 0.5}, {10, 20}),
        ({"min_p": 0.51}, {10}),
        ({"top_k": 2, "top_p": 0.7}, {10, 20}),  # of what top-k left, 10 alone holds only 2/3
        ({"top_k": 2, "top_p": 0.6}, {10}),
        ({"temperature": 0.5, "top_p": 0.7}, {10}),  # the temperature acts first: 10 then holds 0.75
        ({}, {10, 20, 30, 40}),
    ],
)
def test_the_support_is_exactly_the_filters(fields, expected):
    logits = np.full(V, -np.inf, np.float32)
    logits[[10, 20, 30, 40]] = np.log([0.5, 0.25, 0.15, 0.1])
    tokens = {
        int(token) for i in range(60) for token in choose(logits, position=[i * S + j for j in range(S)], **fields)
    }
    assert tokens == expected


# ---- draw ------------------------------------------------------------------------------------------------------------


@given(
    weights=arrays(np.float32, (S, V), elements=st.floats(0, 1, width=32, allow_subnormal=False)),
    uniform=arrays(np.float32, S, elements=st.floats(0, 1 - 2**-24, width=32, allow_subnormal=False)),
    peak=st.integers(0, V - 1),
)
def test_the_draw_inverts_the_running_sum(weights, uniform, peak):
    weights[:, peak] = 1
    tokens = np.asarray(jit_invert(weights, uniform))
    for row, u, token in zip(weights.astype(np.float64), uniform, tokens, strict=True):
        sums = np.cumsum(row)
        assert row[token] > 0
        assert sums[token] - row[token] - 1e-4 <= u * sums[-1] <= sums[token] + 1e-4


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.5}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_frequencies_are_the_distribution(fields):
    rows, vocab, calls = 512, 16, 8
    logits = np.random.default_rng(3).normal(0, 1, vocab).astype(np.float32)
    history = History(jnp.zeros((1, vocab), bool), jnp.zeros((1, vocab), jnp.int32), jnp.zeros((1, vocab)))
    tokens = np.concatenate(
        [
            np.asarray(
                jit_sample(
                    np.tile(logits, (rows, 1)),
                    history,
                    np.zeros(rows, np.int32),
                    make_rows(rows, position=np.arange(rows) + rows * call, **fields),
                )
            )[:, 0]
            for call in range(calls)
        ]
    )
    expected = np.exp(logits / fields.get("temperature", 1.0))
    expected[expected < np.sort(expected)[::-1][fields.get("top_k", vocab) - 1]] = 0
    expected[~nucleus(expected, fields.get("top_p", 1.0) - 1e-9)] = 0
    expected[expected < fields.get("min_p", 0.0) * expected.max()] = 0
    expected *= tokens.size / expected.sum()
    found = np.bincount(tokens, minlength=vocab)
    assert (found[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((found - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < 37.7  # 99.9 % quantile at 15 degrees of freedom


def test_a_draw_depends_on_seed_choice_and_position_alone():
    logits = some_logits(4)
    base = {"seed": (3, 9), "choice": 2, "position": 40, "temperature": 2.0}
    (expected,) = set(choose(logits, **base).tolist())
    for row in range(S):
        noisy = some_logits(5, rows=S)
        noisy[row] = logits
        seeds = np.full((S, 2), 77, np.uint32)
        seeds[row] = base["seed"]
        positions = np.arange(S) * 10
        positions[row] = base["position"]
        choices, top_k = np.zeros(S), np.full(S, 4)
        choices[row], top_k[row] = base["choice"], 0
        tokens = choose(noisy, seed=seeds, position=positions, choice=choices, top_k=top_k, temperature=2.0)
        assert tokens[row] == expected


@pytest.mark.parametrize("change", [{"seed": (4, 9)}, {"seed": (3, 10)}, {"choice": 3}, {"position": 41}])
def test_each_part_of_the_key_changes_the_draws(change):
    logits = np.zeros(V, np.float32)
    base = {"seed": (3, 9), "choice": 2, "position": 40}
    assert (choose(logits, **base) != choose(logits, **base | change)).all()


# ---- penalties, biases, bans -----------------------------------------------------------------------------------------


def make_history(seed: int) -> tuple[History, list[list[int]], list[list[int]]]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, V, 20).tolist() for _ in range(S)]
    outputs = [[*rng.integers(0, V, 15).tolist(), 3, 3, 3] for _ in range(S)]
    in_prompt, counts, bias = np.zeros((S, V), bool), np.zeros((S, V), np.int32), np.zeros((S, V), np.float32)
    for row in range(S):
        in_prompt[row, prompts[row]] = True
        np.add.at(counts[row], outputs[row], 1)
        bias[row, rng.integers(0, V, 5)] = rng.normal(0, 5, 5)
    return History(in_prompt, counts, bias), prompts, outputs


@pytest.mark.parametrize("seed", range(3))
def test_penalties_equal_a_loop_over_the_tokens(seed):
    history, prompts, outputs = make_history(seed)
    logits = some_logits(seed, rows=S)
    fields = {"repetition": [1.0, 1.5, 0.7, 2.0], "presence": [0.5, 0, -1, 2], "frequency": [0, 0.25, 1, -0.5]}
    got = np.asarray(penalise(logits, history, make_rows(**fields)))
    for row in range(S):
        expected = logits[row] + history.bias[row]
        for token in set(prompts[row]) | set(outputs[row]):
            factor = np.float32(fields["repetition"][row])
            expected[token] = expected[token] / factor if expected[token] > 0 else expected[token] * factor
        for token in set(outputs[row]):
            expected[token] -= fields["presence"][row]
        for token in outputs[row]:
            expected[token] -= np.float32(fields["frequency"][row])
        np.testing.assert_allclose(got[row], expected, rtol=1e-5, atol=1e-5)


def test_only_rows_with_a_history_are_penalised_and_slots_may_be_in_any_order():
    history, _, _ = make_history(0)
    history = history._replace(bias=np.eye(S, V, dtype=np.float32) * 1_000)  # slot i prefers token i
    logits = some_logits(6)
    tokens = choose(logits, history=history, slots=[2, 0, 3, 1], greedy=True)
    assert (tokens == logits.argmax()).all()
    rows = make_rows(greedy=True)._replace(history=np.array([True, False, True, True]))
    tokens = np.asarray(jit_sample(np.tile(logits, (S, 1)), history, np.array([2, 0, 3, 1], np.int32), rows))[:, 0]
    assert tokens.tolist() == [2, logits.argmax(), 3, 1]


def test_banned_stops_are_never_chosen_and_only_where_banned():
    logits = np.full(V, -5.0, np.float32)
    logits[[0, 7, 299]] = [9, 8, 7]
    banned = choose(logits, greedy=True, stop_ids=(0, 7), ban_stops=[True, False, True, False])
    assert banned.tolist() == [299, 0, 299, 0]
    drawn = [choose(logits, stop_ids=(0, 7), ban_stops=True, position=i, temperature=9.0) for i in range(50)]
    assert not np.isin(drawn, [0, 7]).any()


# ---- broken rows, log-probabilities ----------------------------------------------------------------------------------


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_broken_row_is_minus_one_and_its_neighbours_are_unchanged(poison, greedy):
    logits = some_logits(8, rows=S)
    fields = {"greedy": greedy, "top_k": 30, "top_p": 0.9, "logprobs": True}
    expected = choose(logits, **fields)
    for place in (0, 150, V - 1):
        logits[2, place] = poison
        tokens = choose(logits, **fields)
        assert tokens[2] == -1
        assert np.delete(tokens, 2).tolist() == np.delete(expected, 2).tolist()
        logits[2, place] = 0


def test_nothing_left_to_choose_is_broken():
    logits = np.full(V, -np.inf, np.float32)
    logits[5] = 1
    assert choose(logits, stop_ids=(5,), ban_stops=[True, False, False, False]).tolist() == [-1, 5, 5, 5]


@pytest.mark.parametrize("vocab", [7, V])
def test_log_probabilities_are_the_raw_log_softmax(vocab):
    logits = np.random.default_rng(9).normal(0, 3, (S, vocab)).astype(np.float32)
    rows = make_rows(logprobs=[True, False, True, True], temperature=3.0, top_k=4)
    packed = np.asarray(jit_sample(logits, no_history(vocab), np.arange(S, dtype=np.int32), rows))
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    count = min(vocab, MAX_LOGPROBS)
    for row in range(S):
        token, top = packed[row, 0], packed[row, 2 : 2 + MAX_LOGPROBS]
        values = packed[row, 1:].view(np.float32)
        assert values[0] == pytest.approx(expected[row, token], abs=1e-5)
        order = np.argsort(-logits[row], kind="stable")[:count]
        assert top.tolist() == [*order, *[-1] * (MAX_LOGPROBS - count)]
        np.testing.assert_allclose(values[1 + MAX_LOGPROBS :][:count], expected[row, order], atol=1e-5)
