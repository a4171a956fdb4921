"""What a tokenizer file must offer before the rules that all tokenizers share (BOS, control tokens) are put on top."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

Place = Literal["start", "after_bos", "inside"]
"""Where a piece of text stands: at the very start, right after a spelled-out leading BOS, or after anything else."""

METASPACE = "▁"
"""U+2581, which SentencePiece writes for a space."""


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The tokens of a file that are no ordinary text, and what the file itself says about BOS and EOS.

    special: never part of decoded text. markers: part of it, yet no caller may spell them (see `is_marker`). strips:
    white space swallowed on the (left, right) of a token. bos, eos: spellings, "" for none. adds_bos: whether encoding
    puts BOS in front by default.
    """

    special: dict[str, int]
    markers: dict[str, int]
    bos: str
    eos: str
    adds_bos: bool
    strips: dict[str, tuple[bool, bool]] = field(default_factory=dict)


class Codec(Protocol):
    """Plain text to ids and ids to bytes; every piece of text is taken literally."""

    @property
    def size(self) -> int:
        """Ids run from 0 to size - 1."""
        ...

    @property
    def controls(self) -> ControlTokens:
        """The tokens that plain text never becomes."""
        ...

    @property
    def drops_space(self) -> bool:
        """True where encoding puts a space before a text, so that decoding takes one away."""
        ...

    def encode(self, text: str, place: Place) -> list[int]:
        """Ids of a literal piece of text."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one id in range."""
        ...

    def files(self) -> dict[str, bytes]:
        """The file this codec was made from."""
        ...


def is_marker(spelling: str) -> bool:
    """Whether a user-defined token is a marker such as `<tool_call>` rather than a run of spaces or a word.

    Markers are what templates and tools give a meaning to, and they carry punctuation; vocabularies also define runs of
    spaces, line ends and words, which a caller's text must go on becoming.
    """
    return any(not (letter.isalnum() or letter.isspace() or letter == METASPACE) for letter in spelling)
