"""The comparison's own arithmetic, and our side of it on the tiny model; their side needs torch and is not run here."""

from dataclasses import replace
from pathlib import Path

import pytest
from tqdm import tqdm


@pytest.fixture(scope="module")
def bench(script):
    return script("bench_peers")


class FakeSide:
    """Answers like a side whose steps take the given seconds."""

    def __init__(self, seconds: list[float], first: int) -> None:
        self.seconds = seconds
        self.first = first
        self.calls: list[tuple] = []

    def call(self, method: str, *arguments):
        self.calls.append((method, *arguments))
        if method == "fill":
            return [self.first] * len(arguments[0])
        return self.seconds if method == "decode" else (self.seconds[0], self.first)


def test_a_row_is_the_ratio_of_medians(bench):
    case = bench.Case("decode", 2, 4, 3, 1.0)
    ours, theirs = FakeSide([0.1, 9.0, 0.1], 5), FakeSide([0.3, 0.2, 0.2], 5)
    row = bench.measure(case, (ours, theirs), 2, tqdm(disable=True))
    assert row.ratio == pytest.approx(2.0)
    assert row.same_first_token
    assert [call[0] for call in ours.calls] == ["fill", "decode", "decode"]
    assert ours.calls == theirs.calls


def test_prefill_sends_a_new_prompt_every_turn_and_the_same_to_both(bench):
    case = bench.Case("prefill", 1, 16, 0, 1.0)
    ours, theirs = FakeSide([0.1], 5), FakeSide([0.4], 6)
    row = bench.measure(case, (ours, theirs), 3, tqdm(disable=True))
    assert row.ratio == pytest.approx(4.0)
    assert not row.same_first_token
    assert ours.calls == theirs.calls
    assert len({tuple(prompt) for _, prompt in ours.calls}) == 3


def test_the_table_counts_tokens_not_steps(bench):
    case = bench.Case("decode, 8 streams", 8, 128, 4, 1.5)
    text = bench.table([bench.Row(case, 0.1, 0.2, same_first_token=True)])
    assert "| decode, 8 streams | 100.0 ms | 80 tok/s | 200.0 ms | 40 tok/s | **2.00** | 1.5 |" in text
    assert "equal in 1 of 1 rows" in text
    prefill = bench.table([bench.Row(replace(case, rows=1, context=512, steps=0), 0.5, 1.0, same_first_token=False)])
    assert "500.0 ms | 1,024 tok/s" in prefill
    assert "equal in 0 of 1 rows" in prefill


def test_our_side_serves_through_the_loop(script, tiny_path: Path):
    """First tokens are those of the recital; each decode turn times its steps; a new fill replaces the old one."""
    ours = script("peers").Ours(str(tiny_path), slots=2)
    loop, tokenizer = ours._assembly.loop, ours._assembly.tokenizer
    text = (tiny_path.parent / "text.txt").read_text().strip()
    ids = tokenizer.encode(text)
    seconds, first = ours.prefill(ids[:40])
    assert seconds > 0
    assert first == ids[40]
    assert ours.fill([ids[:20], ids[:50]]) == [ids[20], ids[50]]
    before = loop.stats().output_tokens
    assert len(ours.decode(4)) == 4
    assert loop.stats().output_tokens - before == 2 * 5  # two rows, and one step that is not timed
    assert ours.fill([ids[:25]]) == [ids[25]]
    assert loop.stats().running == 1
