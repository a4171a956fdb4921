"""Experts of four bits a weight, laid out as the hub's gpt-oss files have them.

Of each expert's matrix `[out, in]`, `_blocks` holds `[out, in / 32, 16]` bytes, two numbers of four bits a byte, and
`_scales` `[out, in / 32]` exponents of two, 127 above (OCP microscaling formats, MXFP4). Both are drawn at random;
what they decode to is transformers' own answer, and llama.cpp's file of them must decode to the same.
"""

from collections.abc import Mapping
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from transformers import PreTrainedModel  # pyright: ignore[reportMissingImports]
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # pyright: ignore[reportMissingImports]

from .recipe import Fields, as_before_5

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def pack(model: PreTrainedModel) -> Mapping[str, torch.Tensor]:
    """The model's tensors as a file has them; the model itself then holds what they decode to, in float32."""
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        if not name.endswith(EXPERTS):
            stored[name] = weight.data.bfloat16()
            weight.data = stored[name].float()
            continue
        experts, width, out = weight.shape  # transformers multiplies from the left
        shape = (experts, out, width // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weight.data = convert_moe_packed_tensors(blocks, scales).float()
    return stored


def written(fields: Fields) -> Fields:
    """`config.json` as the hub has it."""
    dense = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization: dict[str, Any] = {"modules_to_not_convert": dense, "quant_method": "mxfp4"}
    return as_before_5(fields) | {"torch_dtype": "bfloat16", "quantization_config": quantization}
