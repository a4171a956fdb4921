"""Ours beside what transformers recorded: equal where the weights are, and the damaged tensor named where not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.load import load
from jaxinfer.doctor.compare import Difference, Reference, differences, diverging_tensors, first_divergence
from jaxinfer.doctor.diagnose import compared
from jaxinfer.doctor.forward import LOGITS, Activations, Probe, part_names
from jaxinfer.errors import CheckpointError

TINY = Path(__file__).parents[1] / "golden" / "tiny_llama"
TIGHT = 1e-5
HALF = 0.5


def run(path: Path, ids: np.ndarray) -> tuple[Checkpoint, Activations]:
    checkpoint = load(str(path), dtype="float32")
    probe = Probe(checkpoint.config, checkpoint.params, "float32", 64, checkpoint.tokenizer.vocab_size)
    return checkpoint, probe.activations(ids.tolist())


def test_every_part_equals_that_of_transformers(reference: Reference, recording: dict[str, np.ndarray]):
    checkpoint, parts = run(TINY, recording["ids"])
    assert list(parts) == part_names(checkpoint.config.layers)
    assert set(parts) == set(reference.activations)
    found = compared(checkpoint, reference, parts, TIGHT)
    assert (found.diverged, found.tensors) == (None, ())
    assert max(row.share for row in found.parts) < TIGHT
    assert all(row.magnitude > HALF for row in found.parts), "a reference of nothing would equal anything"


def test_our_tensors_are_those_of_the_reference(reference: Reference):
    checkpoint = load(str(TINY), dtype="float32")
    names = part_names(checkpoint.config.layers)
    assert [diverging_tensors(checkpoint.config, checkpoint.params, part, reference) for part in names] == [[]] * len(
        names
    )


LAYER = "model.layers.{}.{}.weight".format
DAMAGES = {
    "model.embed_tokens.weight": "embedding",
    LAYER(0, "input_layernorm"): "block 0 attention output",
    LAYER(0, "self_attn.q_proj"): "block 0 attention output",
    LAYER(0, "mlp.up_proj"): "block 0 MLP output",
    LAYER(1, "self_attn.k_proj"): "block 1 attention output",
    LAYER(1, "self_attn.o_proj"): "block 1 attention output",
    LAYER(1, "post_attention_layernorm"): "block 1 MLP output",
    LAYER(1, "mlp.down_proj"): "block 1 MLP output",
    "model.layers.1.self_attn.v_proj.bias": "block 1 attention output",
    "model.norm.weight": "final norm",
    "lm_head.weight": "logits",
}


@pytest.mark.parametrize(("name", "part"), DAMAGES.items())
def test_the_damaged_tensor_and_the_first_part_that_it_spoils_are_named(
    name: str, part: str, damaged: Callable[..., Path], reference: Reference, recording: dict[str, np.ndarray]
):
    checkpoint, parts = run(damaged({name: lambda x: x * np.float32(1.5)}), recording["ids"])
    found = compared(checkpoint, reference, parts, 1e-3)
    assert (found.diverged, found.tensors) == (part, (name,))


def test_of_two_damaged_tensors_the_one_used_first_is_named_first(
    damaged: Callable[..., Path], reference: Reference, recording: dict[str, np.ndarray]
):
    names = [LAYER(1, "self_attn.o_proj"), LAYER(1, "self_attn.v_proj"), LAYER(1, "mlp.up_proj")]
    checkpoint, parts = run(damaged({name: lambda x: -x for name in names}), recording["ids"])
    found = compared(checkpoint, reference, parts, 1e-3)
    assert found.diverged == "block 1 attention output"
    assert found.tensors == (LAYER(1, "self_attn.v_proj"), LAYER(1, "self_attn.o_proj"))


def test_a_nan_of_ours_diverges_and_is_named(
    damaged: Callable[..., Path], reference: Reference, recording: dict[str, np.ndarray]
):
    def broken(x: np.ndarray) -> np.ndarray:
        x.flat[0] = np.nan
        return x

    checkpoint, parts = run(damaged({LAYER(0, "mlp.down_proj"): broken}), recording["ids"])
    found = compared(checkpoint, reference, parts, 1e-3)
    assert (found.diverged, found.tensors) == ("block 0 MLP output", (LAYER(0, "mlp.down_proj"),))


def test_equal_tensors_are_not_blamed_for_other_arithmetic(
    damaged: Callable[..., Path], reference: Reference, recording: dict[str, np.ndarray]
):
    checkpoint, parts = run(damaged(rms_norm_eps=0.5), recording["ids"])
    found = compared(checkpoint, reference, parts, 1e-3)
    assert (found.diverged, found.tensors) == ("block 0 attention output", ())


def test_a_tensor_that_the_reference_calls_otherwise_is_told(reference: Reference):
    checkpoint = load(str(TINY), dtype="float32")
    name = LAYER(0, "mlp.up_proj")
    other = replace(reference, weights={key: value for key, value in reference.weights.items() if key != name})
    (found,) = diverging_tensors(checkpoint.config, checkpoint.params, "block 0 MLP output", other)
    assert found.startswith(f"{name} (the reference has none")


def test_another_model_is_no_reference(reference: Reference):
    ours = dict(reference.activations)
    without = {name: value for name, value in ours.items() if name != LOGITS}
    with pytest.raises(CheckpointError, match=r"logits has shape .* the reference lacks it"):
        differences(ours, without)
    with pytest.raises(CheckpointError, match=r"embedding has shape .* has shape .* the same model"):
        differences({"embedding": ours["embedding"][:5]}, ours)


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        ([Difference("a", 1e-4, 1.0), Difference("b", 2e-4, 0.1)], "b"),
        ([Difference("a", 0.0, 0.0)], None),
        ([Difference("a", 1e-9, 0.0)], "a"),
        ([Difference("a", float("nan"), 1.0)], "a"),
        ([Difference("a", float("inf"), float("inf"))], "a"),
        ([], None),
    ],
)
def test_a_part_diverges_by_its_share_of_the_reference_s_largest(rows: list[Difference], first: str | None):
    found = first_divergence(rows, 1e-3)
    assert (found.part if found else None) == first
