"""What a checkpoint says of itself, and what of that nobody here reads; its tensors as they are stored.

Knows: which format a path holds, and which fields the loader and the tokenizer read beside the families' own. Reads no
weight.
"""

from pathlib import Path
from typing import NamedTuple

from jaxinfer.checkpoint.files import read_json
from jaxinfer.checkpoint.generation import GENERATION_CONFIG, gguf_generation, read_generation
from jaxinfer.checkpoint.gguf import GGUFTensors
from jaxinfer.checkpoint.load import no_model, resolve, with_rope_tensors
from jaxinfer.checkpoint.orbax import MANIFEST, read_config
from jaxinfer.checkpoint.quantization import decoded
from jaxinfer.checkpoint.safetensors import SafetensorsDirectory
from jaxinfer.checkpoint.tensors import Tensors
from jaxinfer.config import ModelConfig
from jaxinfer.model.families import read_gguf, read_hf

HF_LOADER = frozenset({"eos_token_id"})
"""Fields of `config.json` that the loader reads itself."""
GGUF_TOKENIZER = frozenset(
    f"tokenizer.ggml.{name}"
    for name in (
        *("model", "pre", "tokens", "scores", "token_type", "merges", "add_bos_token", "add_space_prefix"),
        *("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id"),
    )
)
"""Metadata that makes the tokenizer."""
GGUF_LOADER = frozenset(
    {"tokenizer.chat_template", "general.name"}
    | {f"general.sampling.{name}" for name in ("temp", "top_k", "top_p", "min_p", "penalty_repeat")}
)
"""Metadata that the loader reads itself, or that settles what a tokenizer does."""
_GGUF_READ = GGUF_TOKENIZER | GGUF_LOADER


class Explained(NamedTuple):
    """The configuration as it was understood, and the names of the fields beside it that change nothing here."""

    config: ModelConfig
    ignored: tuple[str, ...]


def explain_config(ref: str) -> Explained:
    """The configuration of the model `ref`, and what was ignored of its `config.json` (and of the advice in
    `generation_config.json`) or of its GGUF metadata.

    Raises as `load_config` does: a field that may change the arithmetic is refused there, not ignored.
    """
    path = resolve(ref)
    if path.is_file():
        tensors = GGUFTensors(path)
        config, unread = read_gguf(tensors.fields, tensors.shapes)
        ignored = [name for name in unread if name not in _GGUF_READ]
        stretched, _ = with_rope_tensors(config, tensors)
        return Explained(stretched, (*ignored, *gguf_generation(tensors.fields).ignored))
    if (path / MANIFEST).is_file():
        return Explained(read_config(path), ())  # a field that this version does not have is an error there
    if not (path / "config.json").is_file():
        raise no_model(path)
    config, unread = read_hf(read_json(path / "config.json"))
    advice = [f"{GENERATION_CONFIG}: {name}" for name in read_generation(path).ignored]
    return Explained(config, (*(name for name in unread if name not in HF_LOADER), *advice))


def stored_tensors(path: Path) -> Tensors | None:
    """The tensors at `path` under their own names; None for an Orbax directory, whose leaves are ours already.

    Raises CheckpointError as `load` does.
    """
    if path.is_file():
        return GGUFTensors(path)
    if (path / MANIFEST).is_file():
        return None
    return decoded(SafetensorsDirectory(path), read_json(path / "config.json")).tensors
