"""Model families: one row a family, holding its quirks of configuration and its tensor names.

Knows: which architecture of which format is which row. Knows no file format's bytes and no arithmetic: a row becomes
switches of `ModelConfig`. A new family is a new row here and a module with its two tables.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxinfer.config import ModelConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families import (
    deepseek,
    gemma,
    gemma3,
    gpt_oss,
    granite,
    llama,
    mixtral,
    olmo2,
    phi3,
    qwen,
    smollm3,
)
from jaxinfer.model.families.fields import Fields
from jaxinfer.model.families.gguf_ropes import ROPE_TENSORS, with_rope_factors
from jaxinfer.model.families.leaves import Leaf, Naming, leaf_of, unread_tensors
from jaxinfer.model.families.sizes import Shapes
from jaxinfer.model.families.unread import unread_of_gguf, unread_of_hf

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
    "read_gguf",
    "read_hf",
    "unread_tensors",
    "with_rope_factors",
]

QUANTISATIONS = ("fp8", "compressed-tensors", "modelopt", "mxfp4")
"""Methods of `quantization_config` that `checkpoint` decodes while it loads."""


class HuggingFace(NamedTuple):
    """How a family looks in a Hugging Face directory."""

    architecture: str
    model_type: str
    config: Callable[[Fields], ModelConfig]
    naming: Naming


class GGUF(NamedTuple):
    """How a family looks in a GGUF file; `architecture` is None where another row's files carry its models."""

    architecture: str | None
    config: Callable[[Fields, Shapes], ModelConfig]
    naming: Naming


class Family(NamedTuple):
    """One row."""

    name: str
    hf: HuggingFace
    gguf: GGUF


FAMILIES = (
    Family(
        "llama",
        HuggingFace("LlamaForCausalLM", "llama", llama.llama_from_hf, llama.HF),
        GGUF("llama", mixtral.llama_or_mixtral_from_gguf, llama.GGUF_PAIRED),
    ),
    Family(
        "mistral",
        HuggingFace("MistralForCausalLM", "mistral", llama.mistral_from_hf, llama.HF),
        GGUF(None, llama.llama_from_gguf, llama.GGUF_PAIRED),
    ),
    Family(
        "mixtral",
        HuggingFace("MixtralForCausalLM", "mixtral", mixtral.mixtral_from_hf, mixtral.HF),
        GGUF(None, mixtral.llama_or_mixtral_from_gguf, mixtral.GGUF),
    ),
    Family(
        "qwen2",
        HuggingFace("Qwen2ForCausalLM", "qwen2", qwen.qwen2_from_hf, llama.HF),
        GGUF("qwen2", qwen.qwen2_from_gguf, llama.GGUF),
    ),
    Family(
        "qwen3",
        HuggingFace("Qwen3ForCausalLM", "qwen3", qwen.qwen3_from_hf, qwen.HF3),
        GGUF("qwen3", qwen.qwen3_from_gguf, qwen.GGUF3),
    ),
    Family(
        "qwen3_moe",
        HuggingFace("Qwen3MoeForCausalLM", "qwen3_moe", qwen.qwen3_moe_from_hf, qwen.HF3_MOE),
        GGUF("qwen3moe", qwen.qwen3_moe_from_gguf, qwen.GGUF3_MOE),
    ),
    Family(
        "gpt_oss",
        HuggingFace("GptOssForCausalLM", "gpt_oss", gpt_oss.gpt_oss_from_hf, gpt_oss.HF),
        GGUF("gpt-oss", gpt_oss.gpt_oss_from_gguf, gpt_oss.GGUF),
    ),
    Family(
        "deepseek_v3",
        HuggingFace("DeepseekV3ForCausalLM", "deepseek_v3", deepseek.deepseek_v3_from_hf, deepseek.HF),
        GGUF("deepseek2", deepseek.deepseek_v3_from_gguf, deepseek.GGUF),
    ),
    Family(
        "gemma",
        HuggingFace("GemmaForCausalLM", "gemma", gemma.gemma_from_hf, gemma.HF),
        GGUF("gemma", gemma.gemma_from_gguf, llama.GGUF),
    ),
    Family(
        "gemma2",
        HuggingFace("Gemma2ForCausalLM", "gemma2", gemma.gemma2_from_hf, gemma.HF2),
        GGUF("gemma2", gemma.gemma2_from_gguf, gemma.GGUF2),
    ),
    Family(
        "gemma3",
        HuggingFace("Gemma3ForCausalLM", "gemma3_text", gemma3.gemma3_from_hf, gemma3.HF),
        GGUF("gemma3", gemma3.gemma3_from_gguf, gemma3.GGUF),
    ),
    Family(
        "phi3",
        HuggingFace("Phi3ForCausalLM", "phi3", phi3.phi3_from_hf, phi3.HF),
        GGUF("phi3", phi3.phi3_from_gguf, phi3.GGUF),
    ),
    Family(
        "olmo2",
        HuggingFace("Olmo2ForCausalLM", "olmo2", olmo2.olmo2_from_hf, olmo2.HF),
        GGUF("olmo2", olmo2.olmo2_from_gguf, olmo2.GGUF),
    ),
    Family(
        "smollm3",
        HuggingFace("SmolLM3ForCausalLM", "smollm3", smollm3.smollm3_from_hf, llama.HF),
        GGUF("smollm3", smollm3.smollm3_from_gguf, llama.GGUF_PAIRED),
    ),
    Family(
        "granite",
        HuggingFace("GraniteForCausalLM", "granite", granite.granite_from_hf, llama.HF),
        GGUF("granite", granite.granite_from_gguf, llama.GGUF_PAIRED),
    ),
)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration that a Hugging Face `config.json` describes; raises as `read_hf` does."""
    return read_hf(raw)[0]


def read_hf(raw: Mapping[str, Any]) -> tuple[ModelConfig, tuple[str, ...]]:
    """The configuration that a Hugging Face `config.json` describes, and the fields of it that were ignored.

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
        if architectures == [family.hf.architecture] or (
            not architectures and fields.get("model_type") == family.hf.model_type
        ):
            return family.hf.config(fields), unread_of_hf(fields)
    known = ", ".join(family.hf.architecture for family in FAMILIES)
    got = architectures or fields.get("model_type")
    raise ConfigError(f"config.json: architecture is {got!r:.80}; expected one of {known}")


def config_from_gguf(metadata: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
    """The configuration of a GGUF file, from its metadata and the shapes of its tensors; raises as `read_gguf` does."""
    return read_gguf(metadata, shapes)[0]


def read_gguf(metadata: Mapping[str, Any], shapes: Shapes) -> tuple[ModelConfig, tuple[str, ...]]:
    """The configuration of a GGUF file, and the metadata that was ignored. Raises ConfigError as `read_hf` does."""
    fields = Fields(metadata, "GGUF metadata")
    got = fields.get("general.architecture")
    if "token_embd.weight" not in shapes:
        raise ConfigError("GGUF file has no tensor token_embd.weight; it is no language model")
    for family in FAMILIES:
        if family.gguf.architecture is not None and got == family.gguf.architecture:
            return family.gguf.config(fields, shapes), unread_of_gguf(fields, got)
    known = ", ".join(family.gguf.architecture for family in FAMILIES if family.gguf.architecture)
    raise ConfigError(f"GGUF metadata: general.architecture is {got!r:.80}; expected one of {known}")


def family_of(family: str) -> Family:
    """The row called `family`; raises ConfigError where there is none."""
    for row in FAMILIES:
        if row.name == family:
            return row
    raise ConfigError(f"family is {family!r:.80}; expected one of {', '.join(row.name for row in FAMILIES)}")
