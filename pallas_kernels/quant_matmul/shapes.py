"""Real weights that are multiplied quantised, by name, and the numbers of rows that meet them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Shape:
    """A weight [outputs, inputs]: `group` inputs share a scale, 0 is one scale per output."""

    outputs: int
    inputs: int
    values: Literal["int8", "int4"] = "int8"
    group: int = 0
    offset: bool = False

    @property
    def groups(self) -> int:
        """Scales of one output."""
        return self.inputs // self.group if self.group else 1

    @property
    def bytes(self) -> int:
        """Of the values as a TPU or a GPU keeps them: two int4 in one."""
        return self.outputs * self.inputs // (2 if self.values == "int4" else 1)


_LLAMA3_8B = {
    "qkv": (6_144, 4_096),
    "out": (4_096, 4_096),
    "gate_up": (28_672, 4_096),
    "down": (4_096, 14_336),
    "head": (128_256, 4_096),
}
SHAPES: dict[str, Shape] = {
    **{f"llama3-8b {name}, int8": Shape(*size) for name, size in _LLAMA3_8B.items()},
    # Embedding and head stay int8 where the rest is int4.
    **{
        f"llama3-8b {name}, int4 by 32": Shape(*size, "int4", 32, offset=True)
        for name, size in _LLAMA3_8B.items()
        if name != "head"
    },
    "smollm2-135m qkv, int8": Shape(960, 576),
    "smollm2-135m gate_up, int8": Shape(3_072, 576),
    "smollm2-135m down, int8": Shape(576, 1_536),
    "smollm2-135m down, int4 by 32": Shape(576, 1_536, "int4", 32, offset=True),
    # GGUF's own blocks, kept as they are: Q4_1, Q8_0 and Q6_K.
    "smollm2-135m qkv, Q4_1": Shape(960, 576, "int4", 32, offset=True),
    "smollm2-135m head, Q8_0": Shape(49_152, 576, "int8", 32),
    "gemma3-270m down, Q6_K": Shape(640, 2_048, "int8", 16),
}
ROWS = (1, 8, 64, 512)
"""Rows of x: of a decode step, and of a chunk of a prompt."""
