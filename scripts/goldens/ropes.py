"""Cosines and sines of every kind of rotary embedding, from transformers' own modules: tests/golden/ropes.json.

A case holds `config`, as a config.json of transformers 5 has it, and `older`, the same as one of transformers 4; the
positions, and at each the frequency of every pair of features that turns, its cosine and its sine, with any attention
factor in the last two. Positions times frequencies are rounded to float32, so far phases are a thousandth off.
The frequencies of `dynamic` and `longrope` depend on the length: there every position is the last of a sequence of its
own, given to a new module.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (  # pyright: ignore[reportMissingImports]
    DeepseekV3RotaryEmbedding,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding  # pyright: ignore[reportMissingImports]
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # pyright: ignore[reportMissingImports]
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding  # pyright: ignore[reportMissingImports]

from .recipe import GOLDEN, Fields, as_before_5

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONTEXT = 4096
MODULES = {
    "llama": LlamaRotaryEmbedding,
    "phi3": Phi3RotaryEmbedding,
    "gpt_oss": GptOssRotaryEmbedding,
    "deepseek_v3": DeepseekV3RotaryEmbedding,
}


@dataclass(frozen=True)
class Rope:
    """One case: whose configuration, what its rope says, other fields. `context` is the length before stretching."""

    family: str
    parameters: Fields
    fields: Fields = field(default_factory=dict)
    context: int = CONTEXT


def _yarn(**changes: Any) -> Fields:
    return {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": CONTEXT} | changes


def _longrope(pairs: int, **changes: Any) -> Fields:
    short = [round(1.0 + 0.03 * pair, 6) for pair in range(pairs)]
    long = [round(1.0 + 0.4 * pair * pair, 6) for pair in range(pairs)]
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": CONTEXT,
    } | changes


def _phi3(**changes: Any) -> Fields:
    return {"max_position_embeddings": 32 * CONTEXT, "original_max_position_embeddings": CONTEXT} | changes


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STRETCHED = {"max_position_embeddings": 16 * CONTEXT}
MLA = {
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_mtp_layers": 0,
    "first_k_dense_replace": 0,
}
ROPES = {
    "default": Rope("llama", {"rope_type": "default", "rope_theta": 500_000.0}),
    "linear": Rope("llama", {"rope_type": "linear", "factor": 4.0}),
    "dynamic": Rope("llama", {"rope_type": "dynamic", "factor": 4.0}),
    "dynamic, odd factor": Rope("llama", {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 1e6}, context=2048),
    "llama3": Rope(
        "llama", LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}, STRETCHED, 8192
    ),
    "llama3, factor 32": Rope(
        "llama",
        LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0},
        STRETCHED | {"max_position_embeddings": 131_072},
        8192,
    ),
    "yarn": Rope("llama", _yarn(), STRETCHED),
    "yarn, attention factor": Rope("llama", _yarn(attention_factor=0.75), STRETCHED),
    "yarn, betas": Rope("llama", _yarn(beta_fast=20.0, beta_slow=2.0, rope_theta=1e6), STRETCHED),
    "yarn, not truncated": Rope("gpt_oss", _yarn(truncate=False, factor=32.0, rope_theta=150_000.0), {"head_dim": 32}),
    "yarn, mscale": Rope("deepseek_v3", _yarn(mscale=0.707, mscale_all_dim=1.1), STRETCHED | MLA),
    "yarn, equal mscales": Rope("deepseek_v3", _yarn(mscale=1.0, mscale_all_dim=1.0), STRETCHED | MLA),
    "yarn, mscale alone": Rope("deepseek_v3", _yarn(mscale=0.5), STRETCHED | MLA),
    "longrope": Rope("phi3", _longrope(16), _phi3()),
    "longrope, attention factor": Rope("phi3", _longrope(16, attention_factor=1.3), _phi3()),
    "longrope, part of a head": Rope("phi3", _longrope(12, partial_rotary_factor=0.75), _phi3()),
    "part of a head": Rope(
        "phi3", {"rope_type": "default", "partial_rotary_factor": 0.5}, {"max_position_embeddings": CONTEXT}
    ),
}


def write() -> None:
    """Write tests/golden/ropes.json, a case a line."""
    lines = [f"{json.dumps(name)}: {json.dumps(case(rope))}" for name, rope in ROPES.items()]
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    body = ",\n".join(lines)
    (GOLDEN / "ropes.json").write_text(f'{{"made_by": {json.dumps(made_by)}, "cases": {{\n{body}\n}}}}\n')
    print(len(lines), (GOLDEN / "ropes.json").stat().st_size)


def case(rope: Rope) -> Fields:
    """One line of the file."""
    fields = json.loads(make_config(rope).to_json_string(use_diff=False))
    fields["architectures"] = [_ARCHITECTURE[rope.family]]
    positions = [0, 1, rope.context - 1, rope.context, 4 * rope.context]
    frequency, cosine, sine = zip(*(turn(rope, position) for position in positions), strict=True)
    return {
        "config": fields,
        "older": as_before_5(dict(fields)),
        "positions": positions,
        "frequency": frequency,
        "cosine": cosine,
        "sine": sine,
    }


def make_config(rope: Rope) -> transformers.PretrainedConfig:
    """A configuration of the rope's family."""
    parameters = {"rope_theta": 10_000.0} | rope.parameters
    fields = SIZES | {"max_position_embeddings": rope.context} | rope.fields
    return transformers.AutoConfig.for_model(rope.family, **fields, rope_parameters=parameters)


@torch.inference_mode()
def turn(rope: Rope, position: int) -> tuple[list[float], ...]:
    """Frequency, cosine and sine of each pair at `position`, from a module that has seen nothing else."""
    module = MODULES[rope.family](make_config(rope))
    cosine, sine = module(torch.zeros(1), torch.tensor([[position]]))
    pairs = len(module.inv_freq)
    return module.inv_freq.tolist(), cosine[0, 0, :pairs].tolist(), sine[0, 0, :pairs].tolist()


_ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
