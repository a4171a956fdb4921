"""A damaged checkpoint, from one end to the other: each damage is named; a sound one is healthy."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.checkpoint.load import load, save_orbax
from jaxinfer.doctor.compare import Reference
from jaxinfer.doctor.diagnose import compared, diagnose, shortest_context
from jaxinfer.doctor.forward import Probe
from jaxinfer.doctor.reference import require_reference
from jaxinfer.engine.ops import PagedOps
from jaxinfer.errors import CheckpointError, ConfigError, RequestError

from .conftest import TINY, scaled, with_nan, without_row

pytestmark = pytest.mark.usefixtures("machine")
PROJECTION = "model.layers.1.self_attn.o_proj.weight"


def test_a_sound_model_is_healthy():
    found = diagnose(str(TINY), prompt="abc")
    assert found.faults == []
    assert found.config == load(str(TINY), dtype="float32").config
    assert (found.run.prompt, found.run.not_finite, found.run.kernels) == ("abc", None, PagedOps().why)
    assert len(found.run.text) > 0
    weights = json.loads((TINY / "config.json").read_text())["vocab_size"] * 32 * 4
    assert found.run.weight_bytes > 2 * weights
    assert found.run.cache_bytes == 2 * 2 * 2 * 12 * 4
    assert found.run.bound_by == "memory"
    assert len(found.tensors) == 29
    json.dumps(found.as_json())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (with_nan, "1 of 1536 numbers are NaN"),
        (without_row(5), "row 5 holds one number"),
        (scaled(100), "its scale is "),
    ],
    ids=["nan", "row", "scale"],
)
def test_a_damaged_tensor_is_named(damage, said: str, damaged: Callable[..., Path]):
    found = diagnose(str(damaged({PROJECTION: damage})))
    assert found.faults[0].startswith(f"tensor {PROJECTION}: {said}")
    assert [name for name, _ in found.suspicious] == [PROJECTION]


def test_a_nan_shows_in_the_run_too(damaged: Callable[..., Path]):
    found = diagnose(str(damaged({PROJECTION: with_nan})))
    assert found.run.not_finite == "block 1 attention output"
    assert found.faults[1] == "run: block 1 attention output is not finite"
    assert found.run.text == ""


def test_an_ignored_field_is_named_and_is_no_fault(damaged: Callable[..., Path]):
    found = diagnose(str(damaged(colour_of_the_sky="blue")))
    assert "colour_of_the_sky" in found.ignored
    assert found.faults == []


def test_an_orbax_directory_is_examined_leaf_by_leaf(tmp_path: Path, damaged: Callable[..., Path]):
    save_orbax(load(str(damaged({PROJECTION: with_nan})), dtype="float32"), tmp_path / "orbax")
    found = diagnose(str(tmp_path / "orbax"))
    assert [name for name, _ in found.suspicious] == ["block_1/attention/out"]
    assert found.ignored == ()


def test_quantised_weights_are_run_and_weighed_as_they_are(tmp_path: Path):
    plain, small = (diagnose(str(TINY), prompt="abc", quantize=kind) for kind in (None, "int8"))
    assert small.faults == []
    assert small.tensors == plain.tensors
    assert plain.run.weights == "float32"
    assert small.run.weights.startswith("float32, weights in int8")
    assert small.run.weight_bytes < 0.5 * plain.run.weight_bytes
    assert small.run.step_ms < plain.run.step_ms
    save_orbax(load(str(TINY), dtype="float32", quantize="int8"), tmp_path / "orbax")
    stored = diagnose(str(tmp_path / "orbax"), prompt="abc")
    assert stored.faults == []
    assert {stats.name for stats in stored.tensors} >= {"embedding", "block_1/attention/qkv", "block_0/mlp/down"}


def test_quantised_weights_diverge_from_a_reference_by_their_rounding(
    reference: Reference, recording: dict[str, np.ndarray]
):
    checkpoint = load(str(TINY), dtype="float32", quantize="int8")
    probe = Probe(checkpoint.config, checkpoint.params, "float32", 64, checkpoint.tokenizer.vocab_size)
    parts = probe.activations(recording["ids"].tolist())
    tight, wide = (compared(checkpoint, reference, parts, tolerance) for tolerance in (1e-5, 0.2))
    assert (tight.diverged, tight.tensors) == ("embedding", ("model.embed_tokens.weight",))
    assert wide.diverged is None


def test_a_reference_is_run_on_the_same_ids(
    reference: Reference,
    recording: dict[str, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    damaged: Callable[..., Path],
):
    asked = []

    def answer(directory: Path, ids: list[int]) -> Reference:
        asked.append((directory, list(ids)))
        return reference

    tokenizer = load(str(TINY), dtype="float32").tokenizer
    monkeypatch.setattr("jaxinfer.doctor.diagnose.run_reference", answer)
    monkeypatch.setattr("jaxinfer.doctor.diagnose.require_reference", lambda directory: None)
    monkeypatch.setattr("jaxinfer.doctor.diagnose._ids", lambda checkpoint, prompt: recording["ids"].tolist())
    assert tokenizer.vocab_size > 0
    sound = diagnose(str(TINY), reference=TINY)
    assert sound.faults == []
    assert asked == [(TINY, recording["ids"].tolist())]
    found = diagnose(str(damaged({PROJECTION: scaled(1.5)})), reference=TINY)
    assert found.suspicious == ()
    assert found.faults == [
        "reference: block 1 attention output is the first part that diverges; "
        f"the first tensor that differs is {PROJECTION}"
    ]


def test_a_reference_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxinfer\[bench\]'"):
        require_reference(TINY)


def test_a_reference_that_is_no_model_is_refused_before_anything_is_loaded(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        diagnose("no such model", reference=tmp_path)


def test_a_prompt_that_does_not_fit_is_refused():
    with pytest.raises(RequestError, match="the prompt has 107 tokens; expected 1 to 104"):
        diagnose(str(TINY), prompt="x" * 106)


def test_longrope_turns_a_short_prompt_as_transformers_does():
    config = load(str(TINY.with_name("tiny_phi3")), dtype="float32").config
    original = config.rope.original_context
    assert config.rope.kind == "longrope"
    assert config.context > original
    assert shortest_context(config, original) == original
    assert shortest_context(config, original + 1) == config.context
    llama = load(str(TINY), dtype="float32").config
    assert llama.rope.original_context < llama.context
    assert shortest_context(llama, 1) == llama.context
