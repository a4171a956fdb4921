"""What each part of a tiny llama makes of one sequence in transformers: recorded for the tests of `jaxinfer doctor`."""

from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

from .recipe import GOLDEN

NAME, TOKENS = "tiny_llama", 24


@torch.inference_mode()
def write() -> None:
    """Write tests/golden/activations.npz: the ids, and an array [tokens, features] by the name of each part."""
    model: Any = AutoModelForCausalLM.from_pretrained(GOLDEN / NAME, dtype=torch.float32).eval()
    ids = np.load(GOLDEN / NAME / "logits.npz")["ids"][:TOKENS]
    parts: dict[str, torch.Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(
            lambda *call, i=i: parts.update({f"block {i} attention output": call[2][0]})
        )
        layer.mlp.register_forward_hook(lambda *call, i=i: parts.update({f"block {i} MLP output": call[2]}))
        layer.register_forward_hook(lambda *call, i=i: parts.update({f"block {i} output": call[2]}))
    output = model(torch.tensor(ids[None].astype(np.int64)), output_hidden_states=True)
    parts |= {"embedding": output.hidden_states[0], "final norm": output.hidden_states[-1], "logits": output.logits}
    np.savez_compressed(GOLDEN / "activations.npz", ids=ids, **{name: x[0].numpy() for name, x in parts.items()})
