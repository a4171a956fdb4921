"""The runner on a tiny random model: the same tokens whatever the chunks, the neighbours and the time of fetching."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.engine.batches import pack_decodes, unpack
from jaxinfer.engine.runner import EngineRunner, engine_context
from jaxinfer.errors import ConfigError, EngineFault
from jaxinfer.model.transformer import init_params
from jaxinfer.plan import StepPlan
from jaxinfer.request import SampledToken, SamplingParams
from jaxinfer.scheduler.runner import Runner
from pallas_kernels.dispatch import FORMS, OPERATIONS, Entry

from .driver import ENGINE, GREEDY, MODEL, VOCAB, Seq, generate, ids, make_runner, prompt, run

SEEDED = SamplingParams(temperature=1.0, logprobs=20)
PENALISED = SamplingParams(
    temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, logit_bias={5: 3.0}
)


def assert_close(got: list[SampledToken], expected: list[SampledToken]) -> None:
    """Equal tokens, and log-probabilities equal up to the order of sums."""
    assert ids(got) == ids(expected)
    np.testing.assert_allclose([t.logprob for t in got], [t.logprob for t in expected], atol=1e-4)


# ---- equalities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [(8, None), (16, 8, None), (5, 1, 7, None), (1,) * 29 + (None,)])
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_chunked_prefill_equals_whole(runner, chunks, params):
    (whole,) = generate(runner, [Seq(prompt(30), 0, params)], 6)
    (chunked,) = generate(runner, [Seq(prompt(30), 0, params)], 6, chunks=chunks)
    assert_close(chunked, whole)


def test_decode_equals_prefill_of_the_same_tokens(runner):
    (decoded,) = generate(runner, [Seq(prompt(10), 0)], 8)
    for count in range(1, 9):
        (prefilled,) = generate(runner, [Seq(prompt(10) + ids(decoded)[:count], 1)], 0)
        assert_close(prefilled, decoded[count : count + 1])


@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALISED, replace(SEEDED, top_k=9, top_p=0.8, min_p=0.02)])
def test_batched_equals_alone_bit_by_bit(runner, params):
    """In any slot, beside any neighbours: one executable, so every number is the same."""
    (alone,) = generate(runner, [Seq(prompt(20), 0, params)], 8)
    noisy = SamplingParams(temperature=2.0, top_p=0.7, presence_penalty=1.0)
    for slot in (0, 3):
        others = [Seq(prompt(9 + i, i), (slot + i) % 4, noisy, seed=i) for i in (1, 2, 3)]
        sequences = [*others[:2], Seq(prompt(20), slot, params), others[2]]
        assert generate(runner, sequences, 8)[2] == alone


def test_every_bit_of_a_seed_counts(runner):
    seeds = (5, 5 + 2**31, 5 + 2**32, 5 + 2**62)
    made = generate(runner, [Seq(prompt(9), i, SEEDED, seed=seed) for i, seed in enumerate(seeds)], 12)
    assert len({tuple(ids(tokens)) for tokens in made}) == len(seeds)


def test_steps_dispatched_ahead_give_the_same_tokens(runner):
    (expected,) = generate(runner, [Seq(prompt(12), 0, SEEDED)], 10)
    sequence = Seq(prompt(12), 0, SEEDED)
    handles = [runner.dispatch(StepPlan(prefills=(sequence.chunk(),)))]
    handles += [runner.dispatch(StepPlan(decodes=(sequence.decode(),))) for _ in range(10)]
    tokens = [runner.fetch(handle) for handle in handles]
    assert [*tokens[0].prefills, *(step.decodes[0] for step in tokens[1:])] == expected


def test_a_plan_may_change_once_it_is_dispatched(runner):
    """The scheduler goes on using its page tables while the step runs."""
    (expected,) = generate(runner, [Seq(prompt(12), 0)], 3)
    sequence, handles = Seq(prompt(12), 0), []
    for make in (lambda: StepPlan(prefills=(sequence.chunk(),)), *[lambda: StepPlan(decodes=(sequence.decode(),))] * 3):
        sequence.pages = list(range(12))
        handles.append(runner.dispatch(make()))
        sequence.pages[:] = [47] * 12
        sequence.ids[:] = [0] * 12
    steps = [runner.fetch(handle) for handle in handles]
    assert [(*step.prefills, *step.decodes)[0] for step in steps] == expected


def test_one_plan_with_everything_equals_one_call_each(runner):
    sequences = [Seq(prompt(9, i), i, PENALISED) for i in range(2)]
    expected = generate(runner, sequences, 1)
    first, second = [Seq(prompt(9, i), i, PENALISED) for i in range(2)]
    run(runner, StepPlan(seats=(first.seat(),), prefills=(first.chunk(),)))
    mixed = run(runner, StepPlan((second.seat(),), (second.chunk(4), second.chunk()), (first.decode(),)))
    assert ids(mixed) == [expected[1][0].token, expected[0][1].token]


def test_a_chunk_that_does_not_sample_leaves_the_slot_alone(runner):
    (expected,) = generate(runner, [Seq(prompt(12), 0)], 4)
    sequence, other = Seq(prompt(12), 0), Seq(prompt(30, 5), 1)
    tokens = list(run(runner, StepPlan(prefills=(sequence.chunk(),))))
    chunk = replace(other.chunk(16), slot=0)
    assert run(runner, StepPlan(prefills=(chunk,))) == ()
    for _ in range(4):
        tokens += run(runner, StepPlan(decodes=(sequence.decode(),)))
    assert tokens == expected


def test_fetch_waits_for_a_chunk_that_does_not_sample(runner, monkeypatch):
    """Else the host would dispatch a long prompt's every chunk at once, and a cancel would come too late for them."""
    waited = []

    class Output:
        def copy_to_host_async(self) -> None:
            assert not waited

        def __array__(self, *how, **options) -> np.ndarray:
            waited.append(True)
            return np.zeros((1, 42), np.int32)

    monkeypatch.setattr(runner, "_prefill", lambda chunk: Output())
    handle = runner.dispatch(StepPlan(prefills=(Seq(prompt(30), 0).chunk(16),)))
    assert not waited
    assert runner.fetch(handle).prefills == ()
    assert waited


def test_history_is_rebuilt_by_a_seat_with_output(runner):
    """As after a preemption: prompt and output are prefilled again, and penalties know which is which."""
    (expected,) = generate(runner, [Seq(prompt(12), 0, PENALISED)], 8)
    again = Seq(prompt(12), 2, PENALISED)
    run(runner, StepPlan(seats=(again.seat(ids(expected)[:5]),)))
    again.ids += ids(expected)[:5]
    tokens = list(run(runner, StepPlan(prefills=(again.chunk(),))))
    for _ in range(3):
        tokens += run(runner, StepPlan(decodes=(again.decode(),)))
    assert ids(tokens) == ids(expected)[5:]


def test_presence_penalty_forbids_repeats_until_the_slot_is_seated_anew(runner):
    distinct = replace(GREEDY, presence_penalty=100.0)
    for _ in range(2):
        (tokens,) = generate(runner, [Seq(prompt(6), 0, distinct)], 30)
        assert len(set(ids(tokens))) == 31
    (plain,) = generate(runner, [Seq(prompt(6), 0)], 8)
    (elsewhere,) = generate(runner, [Seq(prompt(6), 1)], 8)
    assert plain == elsewhere


# ---- what must not be touched ----------------------------------------------------------------------------------------


def test_padding_writes_nothing(runner):
    sequence = Seq(prompt(12), 1)
    generate(runner, [sequence], 0)
    before = jax.tree.map(np.array, runner._state)
    run(runner, StepPlan(decodes=(sequence.decode(),)))
    after = jax.tree.map(np.array, runner._state)
    written = (sequence.pages[12 // 8], slice(None), slice(None), 12 % 8)
    for old, new in zip(before.pages, after.pages, strict=True):
        assert (old[written] != new[written]).all()
        new[written] = old[written]
        np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(np.delete(before.last_token, 1), np.delete(after.last_token, 1))
    jax.tree.map(np.testing.assert_array_equal, before.history, after.history)


def test_a_broken_row_is_reported_and_harms_no_neighbour(runner):
    neighbours = [Seq(prompt(9, i), i, SEEDED) for i in (1, 2)]
    expected = generate(runner, neighbours, 3)
    broken, *neighbours = [Seq(prompt(9, i), i, SEEDED) for i in range(3)]
    first = [run(runner, StepPlan(prefills=(sequence.chunk(),)))[0] for sequence in (broken, *neighbours)]
    poisoned = tuple(layer.at[broken.pages[0]].set(jnp.nan) for layer in runner._state.pages)
    runner._state = runner._state._replace(pages=poisoned)
    made = [[token] for token in first[1:]]
    for _ in range(3):
        row = run(runner, StepPlan(decodes=tuple(s.decode() for s in (broken, *neighbours))))
        assert row[0] == SampledToken(-1)
        for tokens, token in zip(made, row[1:], strict=True):
            tokens.append(token)
    assert made == expected
    (fresh,) = generate(runner, [Seq(prompt(9, 1), 1, SEEDED)], 3)
    assert fresh == expected[0]


def test_padded_vocabulary_is_never_chosen(runner):
    hot = SamplingParams(temperature=100.0, logprobs=20)
    sequences = [Seq(prompt(4, i), i, hot, seed=i) for i in range(4)]
    tokens = [token for made in generate(runner, sequences, 100) for token in made]
    assert max(ids(tokens)) < VOCAB
    assert max(token for made in tokens for token, _ in made.top) < VOCAB
    assert len(set(ids(tokens))) > 150  # the draw does reach far


def test_log_probabilities_are_cut_to_what_was_asked(runner):
    asked = [None, 0, 3, 20]
    sequences = [Seq(prompt(9), i, SamplingParams(temperature=0, logprobs=k)) for i, k in enumerate(asked)]
    made = generate(runner, sequences, 1)
    assert {tuple(ids(tokens)) for tokens in made} == {tuple(ids(made[0]))}
    for (_, token), count in zip(made, asked, strict=True):
        assert len(token.top) == (count or 0)
        assert (token.logprob is None) == (count is None)
    best = made[3][1]
    assert best.top[0] == (best.token, best.logprob)
    assert sum(np.exp(value) for _, value in best.top) <= 1


# ---- resources -------------------------------------------------------------------------------------------------------


def test_every_step_donates_the_whole_state(runner):
    sequence = Seq(prompt(9), 0, PENALISED)
    for make in (
        lambda: StepPlan(seats=(sequence.seat(),)),
        lambda: StepPlan(prefills=(sequence.chunk(),)),
        lambda: StepPlan(decodes=(sequence.decode(),)),
    ):
        leaves = jax.tree.leaves(runner._state)
        run(runner, make())
        assert all(leaf.is_deleted() for leaf in leaves)


def test_warm_up_runs_everything_and_leaves_no_trace_outside_page_0():
    """Each executable's first run is behind it, its walk over earlier pages included, and every slot is as new."""
    runner = make_runner(EngineConfig(slots=2, chunk=16, cache=CacheConfig(page_size=8)))
    written = [np.asarray(pages).any(axis=(2, 4)) for pages in runner._state.pages]  # [n, 2, b]
    for pages in written:
        assert pages[0, :, 0].all()  # the one token after a page of others
        assert not pages[0, :, 1:].any()
        assert not pages[1:].any()
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(runner._state._replace(pages=())))


def test_serving_compiles_nothing():
    """Over every bucket and every kind of row, alone and mixed."""
    runner = make_runner(EngineConfig(slots=3, chunk=32, cache=CacheConfig(page_size=8)))
    assert runner.compilations["warmup"] > 0
    every = [
        GREEDY,
        PENALISED,
        replace(SEEDED, top_k=5),
        replace(SEEDED, top_p=0.5, min_p=0.1),
        replace(SEEDED, logprobs=None),
    ]
    for params in every:
        for rows in (1, 2, 3):
            sequences = [Seq(prompt(5 + i), i, params, ban=frozenset({1, 2})) for i in range(rows)]
            generate(runner, sequences, 2, chunks=(3, None))
    assert runner.compilations["serving"] == 0


def test_memory_is_flat_over_a_thousand_steps(runner):
    sequence = Seq(prompt(9), 0, PENALISED)
    generate(runner, [sequence], 100)
    process, arrays = psutil.Process(), len(jax.live_arrays())
    before, handle = process.memory_info().rss, None
    for _ in range(1_000):
        sequence.length = 50
        following = runner.dispatch(StepPlan(decodes=(sequence.decode(),)))
        if handle is not None:
            runner.fetch(handle)
        handle = following
    runner.fetch(handle)
    del handle, following
    assert len(jax.live_arrays()) <= arrays
    assert process.memory_info().rss - before < 4 * 2**20


# ---- limits and refusals ---------------------------------------------------------------------------------------------


def test_limits_say_what_was_built(runner):
    checked: Runner = runner
    limits = checked.limits
    assert (limits.slots, limits.pages, limits.page_size, limits.context) == (4, 48, 8, 128)
    assert (limits.chunk, limits.vocab_size) == (32, VOCAB)


def test_a_plan_past_the_limits_is_a_fault(runner):
    with pytest.raises(EngineFault, match="33 prompt tokens in a chunk; expected 1 to 32"):
        runner.dispatch(StepPlan(prefills=(Seq(prompt(33), 0).chunk(),)))
    with pytest.raises(EngineFault, match="5 rows in a decode call; expected 1 to 4"):
        runner.dispatch(StepPlan(decodes=tuple(Seq([1], 0).decode() for _ in range(5))))


def test_dispatch_before_warm_up_is_a_fault(runner):
    cold = EngineRunner(runner._program, runner._params, runner._state, runner.limits, ENGINE)
    with pytest.raises(EngineFault, match="warm_up"):
        cold.dispatch(StepPlan(decodes=(Seq([1], 0).decode(),)))


def test_context_beyond_the_models_is_refused():
    with pytest.raises(ConfigError, match="context is 129; the model was made for 128"):
        engine_context(MODEL, EngineConfig(context=129))
    assert engine_context(MODEL, EngineConfig()) == 128
    assert engine_context(MODEL, EngineConfig(context=40)) == 40


def test_a_runner_says_which_kernels_its_steps_run(runner):
    forms = {kernel.operation: (kernel.form, kernel.why) for kernel in runner.kernels}
    assert forms.keys() == set(OPERATIONS)
    assert forms["kv_write"] == ("xla", "the first of ['xla', 'reference'] offered on cpu")


def build(engine: EngineConfig) -> EngineRunner:
    return EngineRunner.build(MODEL, init_params(MODEL, jnp.float32, jax.random.key(0)), engine)


def test_a_kernel_asked_for_by_name_runs_or_fails_loudly(monkeypatch):
    named = replace(ENGINE, kernels=(("kv_write", "reference"),))
    kernels = {kernel.operation: kernel for kernel in build(named).kernels}
    assert (kernels["kv_write"].form, kernels["kv_write"].why) == ("reference", "asked for by name")
    for wrong in (("kv_write", "fast"), ("attention", "xla"), ("kv_write", "tpu")):
        with pytest.raises(ConfigError, match=rf"kernels: .*{wrong[0]}.*expected"):
            build(replace(ENGINE, kernels=(wrong,)))

    def refuse(*args):
        raise NotImplementedError("pages of 8 tokens are too small")

    monkeypatch.setitem(FORMS, "kv_write", (Entry("picky", refuse), *FORMS["kv_write"]))
    picky = build(replace(ENGINE, kernels=(("kv_write", "picky"),)))
    with pytest.raises(ConfigError, match=r"kv_write=picky.*pages of 8 tokens are too small"):
        picky.warm_up()


def test_a_refusal_where_no_kernel_was_named_is_not_blamed_on_a_name(monkeypatch):
    def refuse(*args):
        raise NotImplementedError("no form can do this")

    monkeypatch.setitem(FORMS, "kv_write", (Entry("reference", refuse),))
    with pytest.raises(NotImplementedError, match="no form can do this"):
        build(ENGINE).warm_up()


def test_a_runner_knows_nothing_of_what_ran_in_another(monkeypatch):
    """The form that is best refuses the longer chunks of one of them; a third, equal to that one, traces no more."""
    reference = Entry("reference").load("kv_write")

    def picky(pages, keys, *rest):
        if keys.shape[1] > 8:
            raise NotImplementedError(f"{keys.shape[1]} tokens are too many")
        return reference(pages, keys, *rest)

    monkeypatch.setitem(FORMS, "kv_write", (Entry("picky", picky), Entry("reference")))
    short, long = replace(ENGINE, slots=1, chunk=8), replace(ENGINE, slots=1, chunk=16)
    runners = [build(engine) for engine in (short, long, long)]
    for runner, engine in zip(runners, (short, long, long), strict=True):
        for bucket in engine.prefill_buckets:
            runner._lower_prefill(bucket)
    first, second, third = ([(it.form, it.why) for it in r.kernels if it.operation == "kv_write"] for r in runners)
    assert [form for form, _ in first] == ["picky"]
    assert second == third
    assert ("reference", "picky cannot: 16 tokens are too many") in second


def test_no_two_rows_of_the_warm_up_write_one_page(monkeypatch):
    packed = []

    def pack(*args):
        packed.append(pack_decodes(*args))
        return packed[-1]

    monkeypatch.setattr("jaxinfer.engine.runner.pack_decodes", pack)
    runner = make_runner()
    (rows,) = packed
    assert len(rows) == ENGINE.slots
    assert (unpack(rows, runner._program.layout).positions[:, 0] >= 0).sum() == 1
