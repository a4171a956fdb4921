"""Real shapes of paged attention, by name: tests shrink them, benchmarks run them whole."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One call: `rows` sequences, each running `tokens` queries at the end of `length` keys."""

    rows: int
    tokens: int
    length: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    planes: int = 2

    @property
    def table_width(self) -> int:
        """Pages that one row needs."""
        return -(-self.length // self.page_size)


SHAPES: dict[str, Shape] = {
    "smollm2-135m decode 1 x 128": Shape(1, 1, 128, 3, 3, 64),
    "smollm2-135m decode 8 x 1024": Shape(8, 1, 1024, 3, 3, 64),
    "smollm2-135m decode 32 x 128": Shape(32, 1, 128, 3, 3, 64),
    "smollm2-135m decode 32 x 1024": Shape(32, 1, 1024, 3, 3, 64),
    "smollm2-135m prefill 512": Shape(1, 512, 512, 3, 3, 64),
    "smollm2-135m last chunk of 2048": Shape(1, 512, 2048, 3, 3, 64),
    "gemma3-270m decode 8 x 1024, window 512": Shape(8, 1, 1024, 1, 4, 256, window=512),
    "gemma3-270m last chunk of 1024, window 512": Shape(1, 512, 1024, 1, 4, 256, window=512),
    "gemma2-2b decode 4 x 512, softcap 50": Shape(4, 1, 512, 4, 2, 256, softcap=50.0),
    "gpt-oss-20b decode 4 x 512, window 128, sinks": Shape(4, 1, 512, 8, 8, 64, window=128, sinks=True),
    "gpt-oss-20b last chunk of 512, window 128, sinks": Shape(1, 256, 512, 8, 8, 64, window=128, sinks=True),
    "gpt-oss-20b prefill 256, sinks": Shape(1, 256, 256, 8, 8, 64, sinks=True),
    "deepseek-v3 decode 4 x 256, one plane": Shape(4, 1, 256, 1, 16, 576, planes=1),
    "deepseek-v3 last chunk of 128, one plane": Shape(1, 64, 128, 1, 16, 576, planes=1),
    "llama3-8b decode 4 x 512, pages of 16": Shape(4, 1, 512, 8, 4, 128, page_size=16),
}
