"""The probe's run is the run that serves."""

from pathlib import Path

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint.load import load
from jaxinfer.doctor.forward import LOGITS, Probe, part_names

GOLDEN = Path(__file__).parents[1] / "golden"


def test_the_probe_continues_as_the_engine_does(tiny_llm: LLM, tiny_path: Path):
    prompt = "The"
    wanted = tiny_llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0.0))[0].token_ids
    checkpoint = load(str(tiny_path), dtype="float32")
    ids = checkpoint.tokenizer.encode(prompt)
    probe = Probe(checkpoint.config, checkpoint.params, "float32", len(ids) + 12, checkpoint.tokenizer.vocab_size)
    made, finite = probe.greedy(ids, probe.activations(ids)[LOGITS][-1], 12, checkpoint.eos_ids)
    assert finite
    assert made == list(wanted)


def test_a_text_ends_with_an_end_of_text_and_never_holds_a_padding_id(tiny_path: Path):
    checkpoint = load(str(tiny_path), dtype="float32")
    ids = checkpoint.tokenizer.encode("The")
    probe = Probe(checkpoint.config, checkpoint.params, "float32", 64, checkpoint.tokenizer.vocab_size)
    logits = probe.activations(ids)[LOGITS][-1]
    (first,), _ = probe.greedy(ids, logits, 1, frozenset())
    assert probe.greedy(ids, logits, 12, frozenset({first})) == ([first], True)
    narrow = Probe(checkpoint.config, checkpoint.params, "float32", 64, first)
    assert narrow.greedy(ids, logits, 1, frozenset())[0][0] < first
    assert probe.greedy(ids, np.full_like(logits, np.nan), 12, frozenset()) == ([], False)


@pytest.mark.parametrize("name", ["tiny_gemma2", "tiny_qwen3_moe", "tiny_deepseek_v3"])
def test_parts_are_caught_of_every_kind_of_block(name: str):
    golden = np.load(GOLDEN / name / "logits.npz")
    checkpoint, ids = load(str(GOLDEN / name), dtype="float32"), golden["ids"][:16].tolist()
    parts = Probe(checkpoint.config, checkpoint.params, "float32", 16, 264).activations(ids)
    assert list(parts) == part_names(checkpoint.config.layers)
    np.testing.assert_allclose(parts[LOGITS], golden["logits"][:16], atol=1e-4, rtol=0)
    widths = {part: value.shape for part, value in parts.items() if part != LOGITS}
    assert set(widths.values()) == {(16, checkpoint.config.width)}
