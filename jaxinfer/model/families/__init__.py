"""Model families: one row a family, holding its quirks of configuration and its tensor names.

Knows: which architecture of which format is which row. Knows no file format's bytes and no arithmetic: a row becomes
switches of `ModelConfig`. A new family is a new row here and a module with its two tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families import gemma3, llama
from jaxinfer.model.families.fields import Fields
from jaxinfer.model.families.gguf_ropes import ROPE_TENSORS, with_rope_factors
from jaxinfer.model.families.leaves import Leaf, Naming, leaf_of
from jaxinfer.model.families.llama import Shapes

__all__ = [
    "FAMILIES",
    "QUANTISATIONS",
    "ROPE_TENSORS",
    "Family",
    "Leaf",
    "Naming",
    "config_from_gguf",
    "config_from_hf",
    "family_of",
    "leaf_of",
    "with_rope_factors",
]

QUANTISATIONS = ("fp8", "compressed-tensors", "modelopt", "mxfp4")
"""Methods of `quantization_config` that `checkpoint` decodes while it loads."""


@dataclass(frozen=True, slots=True)
class Family:
    """One row. `gguf_architecture` is None where another row's GGUF files carry this family's models."""

    name: str
    hf_architecture: str
    hf_model_type: str
    hf_config: Callable[[Fields], ModelConfig]
    hf: Naming
    gguf_architecture: str | None
    gguf_config: Callable[[Fields, Shapes], ModelConfig]
    gguf: Naming


FAMILIES = (
    Family(
        name="llama",
        hf_architecture="LlamaForCausalLM",
        hf_model_type="llama",
        hf_config=llama.llama_from_hf,
        hf=llama.HF,
        gguf_architecture="llama",
        gguf_config=llama.llama_from_gguf,
        gguf=llama.GGUF,
    ),
    Family(
        name="mistral",
        hf_architecture="MistralForCausalLM",
        hf_model_type="mistral",
        hf_config=llama.mistral_from_hf,
        hf=llama.HF,
        gguf_architecture=None,
        gguf_config=llama.llama_from_gguf,
        gguf=llama.GGUF,
    ),
    Family(
        name="gemma3",
        hf_architecture="Gemma3ForCausalLM",
        hf_model_type="gemma3_text",
        hf_config=gemma3.gemma3_from_hf,
        hf=gemma3.HF,
        gguf_architecture="gemma3",
        gguf_config=gemma3.gemma3_from_gguf,
        gguf=gemma3.GGUF,
    ),
)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration that a Hugging Face `config.json` describes.

    Raises ConfigError, naming the field, for an unknown architecture, an unknown rope type, weights quantised in a way
    of their own, or any value that would change the arithmetic and is not implemented.
    """
    fields = Fields(raw, "config.json")
    quantised = fields.mapping("quantization_config")
    if quantised and quantised.get("quant_method") not in QUANTISATIONS:
        raise ConfigError(
            f"config.json: quantization_config has quant_method {quantised.get('quant_method')!r:.80}; "
            f"expected one of {', '.join(QUANTISATIONS)}"
        )
    architectures = fields.get("architectures", [])
    for family in FAMILIES:
        if architectures == [family.hf_architecture] or (
            not architectures and fields.get("model_type") == family.hf_model_type
        ):
            return family.hf_config(fields)
    known = ", ".join(family.hf_architecture for family in FAMILIES)
    got = architectures or fields.get("model_type")
    raise ConfigError(f"config.json: architecture is {got!r:.80}; expected one of {known}")


def config_from_gguf(metadata: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
    """The configuration of a GGUF file, from its metadata and the shapes of its tensors.

    Raises ConfigError as `config_from_hf` does.
    """
    fields = Fields(metadata, "GGUF metadata")
    got = fields.get("general.architecture")
    if "token_embd.weight" not in shapes:
        raise ConfigError("GGUF file has no tensor token_embd.weight; it is no language model")
    for family in FAMILIES:
        if family.gguf_architecture is not None and got == family.gguf_architecture:
            return family.gguf_config(fields, shapes)
    known = ", ".join(family.gguf_architecture for family in FAMILIES if family.gguf_architecture)
    raise ConfigError(f"GGUF metadata: general.architecture is {got!r:.80}; expected one of {known}")


def family_of(family: str) -> Family:
    """The row called `family`; raises ConfigError where there is none."""
    for row in FAMILIES:
        if row.name == family:
            return row
    raise ConfigError(f"family is {family!r:.80}; expected one of {', '.join(row.name for row in FAMILIES)}")
