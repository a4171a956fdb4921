"""Ids to text while they are being made, and stop strings wherever they fall.

Knows: bytes of tokens, UTF-8, stop strings. Does not know the engine, requests or who reads.

The law: whatever the split into `push` calls, what they return, joined, with `finish` at the end, is the text that one
call over all ids gives; and `decode(prompt ids + ids)` is `decode(prompt ids)` followed by that text, where no stop
string hit. Three choices behind it:

* a generation that ends inside a character gives U+FFFD for it, as `bytes.decode("utf-8", "replace")` does;
* a character that the prompt left unfinished and the output completes belongs to the output;
* of several stop strings the one that is complete at the earliest character hits, of two at one character the longer.

Every token costs its own bytes, however long the text is already.
"""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.text.protocol import Tokenizer

_LONGEST_TAIL = 4
"""Bytes: a UTF-8 character has at most four, so an unfinished one lies within the last four."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Piece(NamedTuple):
    """What one token adds: text that is safe to send now, and the token's bytes (b"" for a special token)."""

    text: str
    data: bytes


class OutputBytes:
    """The bytes that each further token adds to the text after `prompt`."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_tokens.values())
        self._bos = tokenizer.special_tokens.get(tokenizer.bos_token)
        self._position = 0
        self._at_start = True
        for token in prompt[:2]:  # what follows them cannot be the start any more
            self._pass(token)
        self._position = len(prompt)

    def of(self, token: int) -> bytes:
        """Bytes of the next token: none for a special token, or for an id of the model's that the tokenizer lacks."""
        first = self._at_start
        self._pass(token)
        if token in self._special or not 0 <= token < self._tokenizer.vocab_size:
            return b""
        data = self._tokenizer.token_bytes(token)
        return data[1:] if first and self._loses_space(token, data) else data

    def tail(self, prompt: Sequence[int]) -> bytes:
        """The last bytes of the prompt's text, enough to hold a character that it left unfinished."""
        data = b""
        for token in reversed(prompt):
            if token not in self._special and 0 <= token < self._tokenizer.vocab_size:
                data = self._tokenizer.token_bytes(token) + data
            if len(data) >= _LONGEST_TAIL:
                break
        return data

    def _pass(self, token: int) -> None:
        """A text starts at its first token, or at its second where the first is BOS."""
        self._at_start = self._position == 0 and token == self._bos
        self._position += 1

    def _loses_space(self, token: int, data: bytes) -> bool:
        """Whether the tokenizer drops this token's space at the start of a text: its own decoding is the witness."""
        return data.startswith(b" ") and self._tokenizer.decode([token]) != data.decode("utf-8", "replace")


class _Matcher:
    """Knuth, Morris and Pratt's automaton for one stop string; `state` characters of it are matched so far."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        self._failure = [0] * (len(pattern) + 1)
        length = 0
        for index in range(1, len(pattern)):
            while length and pattern[index] != pattern[length]:
                length = self._failure[length]
            length += pattern[index] == pattern[length]
            self._failure[index + 1] = length

    def step(self, letter: str) -> bool:
        """Take one character; True where it completes the string."""
        while self.state and self.pattern[self.state] != letter:
            self.state = self._failure[self.state]
        self.state += self.pattern[self.state] == letter
        if self.state < len(self.pattern):
            return False
        self.state = self._failure[self.state]
        return True


class StopScan:
    """Holds back what may become a stop string, and finds the first that is complete.

    `hit` is that string. Nothing of it has been returned by then, nor will be.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._openers = {stop[0] for stop in stops}
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str, *, armed: bool) -> str:
        """Take more text, return what is safe to send. Unless `armed`, strings completed here do not count."""
        if not self._held and self._openers.isdisjoint(text):
            return text
        for index, letter in enumerate(text):
            complete = [matcher.pattern for matcher in self._matchers if matcher.step(letter)]
            if complete and armed:
                self.hit = max(complete, key=len)
                return (self._held + text[: index + 1])[: -len(self.hit)]
        return self._keep(self._held + text)

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def _keep(self, text: str) -> str:
        safe = len(text) - max(matcher.state for matcher in self._matchers)
        self._held = text[safe:]
        return text[:safe]


class Detokenizer:
    """Text of one choice. `stopped` is the stop string that hit, `tokens` how many ids were taken until then.

    A stop string that is complete before `min_tokens` ids does not count. Special tokens have no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self._bytes = OutputBytes(tokenizer, prompt)
        self._utf8 = _Utf8Decoder("replace")
        self._utf8.decode(self._bytes.tail(prompt))
        self._scan = StopScan(stop)
        self._min_tokens = min_tokens
        self.tokens = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, which is cut before it; None so far."""
        return self._scan.hit

    def push(self, ids: Sequence[int]) -> str:
        """The text that is safe to send after these ids; "" for all that come after a stop string."""
        return "".join(self.step(token).text for token in ids)

    def step(self, token: int) -> Piece:
        """Take one id. After a stop string hit, nothing is taken."""
        if self.stopped is not None:
            return Piece("", b"")
        self.tokens += 1
        data = self._bytes.of(token)
        return Piece(self._send(self._utf8.decode(data)), data)

    def finish(self) -> str:
        """The rest of the text; again "" when called again."""
        if self.stopped is not None:
            return ""
        text = self._send(self._utf8.decode(b"", final=True))
        return text if self.stopped is not None else text + self._scan.flush()

    def _send(self, text: str) -> str:
        return self._scan.feed(text, armed=self.tokens >= self._min_tokens)
