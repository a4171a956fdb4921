"""What describes a tiny random model: its configuration, and how each switch of it is shown to matter.

Knows the sizes that all of them share. Knows nothing of any family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel  # pyright: ignore[reportMissingImports]

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
VOCAB = 264
TOKENS = 72
Fields = dict[str, Any]
QUIETER = {"": 0.75}
"""`louder` of a model whose logits would else have float32 noise near the 1e-4 that the tests allow."""


@dataclass(frozen=True)
class Tiny:
    """A tiny random model.

    config: as transformers builds it.
    seed: of weights and token ids.
    without: label to configuration fields with which a switch is off; each must move the logits.
    neutral: regular expressions; the tensors that match one, put back to what a new model starts with, must move them.
    louder: regular expression to factor; matching tensors are drawn that much larger.
    written: edits `config.json` to what the hub's files say where transformers writes it another way.
    gguf: fields that a GGUF file cannot say, with what its reader takes them for; None where there is no such file.
    short: also keep the logits of the first so many tokens run alone, for a rope that depends on the length.
    packed: turns the model's experts into the tensors of an mxfp4 file, and the model's own into what those decode to.
    """

    config: PretrainedConfig
    seed: int
    without: Mapping[str, Fields] = field(default_factory=dict)
    neutral: tuple[str, ...] = ()
    louder: Mapping[str, float] = field(default_factory=dict)
    written: Callable[[Fields], Fields] = lambda fields: fields
    gguf: Fields | None = field(default_factory=dict)
    short: int | None = None
    packed: Callable[[PreTrainedModel], Mapping[str, Any]] | None = None


def sizes(layers: int, **changes: Any) -> Fields:
    """Sizes that the models share; `head_dim` is not width / heads."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    } | changes


def plain_rope(theta: float = 10_000.0) -> Fields:
    """The rope that nothing stretches, as a configuration field."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def as_before_5(fields: Fields) -> Fields:
    """`config.json` as transformers 4 wrote it: `rope_theta`, and `rope_scaling` or null, in place of one mapping."""
    rope = dict(fields.pop("rope_parameters"))
    theta, partial = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", None)
    scaling = None if rope["rope_type"] == "default" else rope
    fields.pop("dtype", None)
    older = {"rope_theta": theta, "rope_scaling": scaling, "torch_dtype": "float32", "transformers_version": "4.51.0"}
    return fields | older | ({} if partial is None else {"partial_rotary_factor": partial})
