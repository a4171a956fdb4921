"""The shape of one call of paged attention; each operation's folder names the real ones."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    """`rows` sequences, each running `tokens` queries (1 in decode) at the end of `length` keys."""

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
