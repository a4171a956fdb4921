"""What the families with a mixture of experts share in their files.

Knows: llama.cpp's names of stacked experts and of their metadata. Knows no family.
"""

from jaxinfer.errors import ConfigError
from jaxinfer.model.families.fields import Fields

GGUF_EXPERTS = {
    "block/experts/router": ("blk.{i}.ffn_gate_inp.weight",),
    "block/experts/gate_up": ("blk.{i}.ffn_gate_exps.weight", "blk.{i}.ffn_up_exps.weight"),
    "block/experts/down": ("blk.{i}.ffn_down_exps.weight",),
}
SIGMOID = 2
"""The value of `expert_gating_func` that scores each expert by itself."""


def experts_count(fields: Fields, *names: str) -> int:
    """How many experts a `config.json` has, under its own name or the one that transformers 5 gives to all families."""
    spelled = [name for name in names if fields.get(name) is not None] or [names[0]]
    counts = {name: fields.whole(name) for name in spelled}
    if len(set(counts.values())) > 1:
        raise ConfigError(f"{fields.where}: {counts} say different things; expected one of them")
    return counts[spelled[0]]


def active_weights_scale(fields: Fields, arch: str) -> float:
    """What the weights of a token's experts are multiplied by; 0 stands for not at all."""
    name = f"{arch}.expert_weights_scale"
    return 1.0 if fields.get(name, 0) == 0 else fields.number(name)
