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
        """Control tokens by their text, such as `<|im_end|>`; they have no place in decoded text."""
        ...

    @property
    def reserved_tokens(self) -> dict[str, int]:
        """What a caller's text must never become by being spelled out: the special tokens, and markers that do show
        in decoded text, such as `<tool_call>`."""
        ...

    @property
    def bos_token(self) -> str:
        """The spelling that chat templates call `bos_token`; "" where there is none."""
        ...

    @property
    def eos_token(self) -> str:
        """The spelling that chat templates call `eos_token`; "" where there is none."""
        ...

    def encode(self, text: str, *, bos: bool = True, special: bool = False, sentinel: str = "") -> list[int]:
        """Ids of `text`, with exactly one BOS in front where `bos` and the tokenizer adds one by default.

        Reserved tokens spelled out in `text` become their ids only where `special`; else they are plain text. Every
        `sentinel` is taken out of the text after they were found, so that one with a sentinel inside is plain text.
        Raises RequestError where `text` is no string of Unicode characters.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. Raises RequestError for an id out of range."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for inside a text (a special token: its spelling in UTF-8).

        Raises RequestError for an id out of range.
        """
        ...

    def files(self) -> dict[str, bytes]:
        """File names and contents from which `load_tokenizer` makes an equal tokenizer."""
        ...
