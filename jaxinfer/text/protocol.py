"""What the rest of jaxinfer may ask of a tokenizer."""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to ids and back. Implementations are immutable and safe to share between threads."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id put before a prompt where this tokenizer does so by default, else None."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that the tokenizer itself calls the end of text (config files may add more)."""
        ...

    @property
    def special_tokens(self) -> dict[str, int]:
        """Control tokens by their text, such as `<|im_end|>`."""
        ...

    def encode(self, text: str, *, bos: bool = True, special: bool = False) -> list[int]:
        """Ids of `text`, with exactly one BOS in front where `bos` and the tokenizer has one.

        Control tokens spelled out in `text` become their ids only where `special`; else they are plain text.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for inside a text (a special token: its spelling in UTF-8)."""
        ...
