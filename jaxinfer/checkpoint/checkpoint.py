"""What a loaded checkpoint is, whatever format it came in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.errors import CheckpointError
from jaxinfer.text.protocol import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """A model in memory. `params` is a nested dict of arrays.

    eos_ids is the union of what the model's, the generation's and the tokenizer's configuration call the end of text.
    sampling is what the checkpoint recommends for fields of `SamplingParams`; nothing applies it unasked. Raises
    CheckpointError where an end of text is no id of the model.
    """

    name: str
    config: ModelConfig
    params: Any
    tokenizer: Tokenizer
    chat_template: str | None
    eos_ids: frozenset[int]
    sampling: Mapping[str, float | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for token in self.eos_ids:
            if not 0 <= token < self.config.vocab_size:
                raise CheckpointError(f"end-of-text id {token} is no id of a {self.config.vocab_size}-word vocabulary")
