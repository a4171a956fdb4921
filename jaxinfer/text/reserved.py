"""Finds control tokens that are spelled out in a text, and breaks up those that a caller spelled.

Knows: spellings and ids. Does not know which tokenizer they belong to, or what they mean.
"""

import re
from collections.abc import Iterator, Mapping

WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""Unicode's White_Space, which the `tokenizers` package strips; Python's `str.strip` takes U+001C to U+001F too."""


class ReservedTokens:
    """A set of spellings, each with an id; the longest one at a place wins, the leftmost first.

    `strips` names those that swallow white space on their (left, right) side, as Hugging Face's `AddedToken` does.
    Candidates are found by their first character, then looked up by length: the time does not grow with the number of
    spellings (Gemma reserves 6,250 of them, and a regular expression would try each at every "<").
    """

    def __init__(self, tokens: Mapping[str, int], strips: Mapping[str, tuple[bool, bool]] | None = None) -> None:
        self._ids = {spelling: token for spelling, token in tokens.items() if spelling}
        self._strips = dict(strips or {})
        lengths: dict[str, set[int]] = {}
        for spelling in self._ids:
            lengths.setdefault(spelling[0], set()).add(len(spelling))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._first = re.compile("[" + re.escape("".join(sorted(lengths))) + "]") if lengths else None
        self._heads = {spelling[:n] for spelling in self._ids for n in range(1, len(spelling))}
        self._tails = {spelling[n:] for spelling in self._ids for n in range(1, len(spelling))}
        self._longest = max(map(len, self._ids), default=0)

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, id) of each reserved token in `text`, left to right, without overlaps."""
        done = 0
        for start, end in self._places(text):
            if start >= done:
                done = end
                yield start, end, self._ids[text[start:end]]

    def _places(self, text: str) -> Iterator[tuple[int, int]]:
        """(start, end) of the longest reserved token at each place where one starts, overlaps included."""
        for candidate in self._first.finditer(text) if self._first else ():
            start = candidate.start()
            for length in self._lengths[text[start]]:
                if text[start : start + length] in self._ids:
                    yield start, min(start + length, len(text))
                    break

    def split(self, text: str) -> list[str | int]:
        """The pieces of `text` in order: ids of reserved tokens, and the (never empty) strings between them."""
        parts: list[str | int] = []
        done, strip_left = 0, False
        for start, end, token in self.find(text):
            left, right = self._strips.get(text[start:end], (False, False))
            between = text[done:start]
            between = between.lstrip(WHITE_SPACE) if strip_left else between
            between = between.rstrip(WHITE_SPACE) if left else between
            parts += [between, token] if between else [token]
            done, strip_left = end, right
        rest = text[done:].lstrip(WHITE_SPACE) if strip_left else text[done:]
        return [*parts, rest] if rest else parts

    def break_up(self, text: str, sentinel: str) -> str:
        """`text` with `sentinel` put so that neither it nor its seams with other texts hold a reserved token.

        Taking the sentinel out again gives `text` back. Ends that could complete a token together with a neighbour
        ("<|im_" before "end|>") are fenced off too.
        """
        pieces, done = [], 0
        for start, _ in self._places(text):
            pieces += [text[done : start + 1], sentinel]
            done = start + 1
        broken = "".join(pieces) + text[done:]
        if any(text[:n] in self._tails for n in range(1, min(self._longest, len(text) + 1))):
            broken = sentinel + broken
        if any(text[-n:] in self._heads for n in range(1, min(self._longest, len(text) + 1))):
            broken += sentinel
        return broken
