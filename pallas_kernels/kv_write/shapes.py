"""Real shapes of a cache write, by name: `rows` sequences, each storing `tokens` from position `start` on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One call; the pool holds just the pages that the rows need, and one more."""

    rows: int
    tokens: int
    start: int
    kv_heads: int
    head_dim: int
    page_size: int = 64
    planes: int = 2

    @property
    def table_width(self) -> int:
        """Pages that one row needs."""
        return -(-(self.start + self.tokens) // self.page_size)


SHAPES: dict[str, Shape] = {
    "smollm2-135m decode 1": Shape(1, 1, 127, 3, 64),
    "smollm2-135m decode 32": Shape(32, 1, 1023, 3, 64),
    "smollm2-135m prefill 512": Shape(1, 512, 0, 3, 64),
    "smollm2-135m chunk inside a page": Shape(1, 512, 100, 3, 64),
    "gemma3-270m prefill 32": Shape(1, 32, 64, 1, 256),
    "deepseek-v3 decode 4, one plane": Shape(4, 1, 100, 1, 576, planes=1),
    "deepseek-v3 prefill 128, one plane": Shape(1, 128, 32, 1, 576, planes=1),
    "llama3-8b prefill 128, pages of 16": Shape(1, 128, 48, 8, 128, page_size=16),
}
