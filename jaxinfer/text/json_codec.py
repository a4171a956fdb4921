"""Hugging Face `tokenizer.json` files, run by the `tokenizers` package.

Knows: the JSON's sections, and the two ways in which its decoders turn pieces into bytes (byte-level, and SentencePiece
with byte fallback). Knows nothing of BOS rules or chat.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from tokenizers import Tokenizer as Backend

from jaxinfer.errors import CheckpointError
from jaxinfer.text.codec import METASPACE, ControlTokens, Place, is_marker
from jaxinfer.text.settings import CONFIG, NOTHING_SAID, AddedToken, TokenizerSettings, added_token

SpellingToBytes = Callable[[str], bytes]


class JsonCodec:
    """One parsed `tokenizer.json` with what `settings` say beside it.

    Raises CheckpointError where it is damaged, where the settings contradict it, or where its decoder is not one whose
    tokens have bytes of their own.
    """

    def __init__(self, source: str, settings: TokenizerSettings = NOTHING_SAID) -> None:
        parsed = _parse(source)
        layout = _merged(parsed, settings)
        self._source = source if layout is parsed else json.dumps(layout, ensure_ascii=False)
        backend = _backend(layout)
        self._to_bytes, self.drops_space = _decoder(layout)
        self._spellings = _spellings(backend)
        self._added = _added(backend, layout)
        self.controls = _controls(backend, self._added, settings)
        plain = _without_reserved(layout, self.controls)
        later = _without_first_prefix(plain)
        self._first = backend if plain == layout else _backend(plain)
        self._later = self._first if later == plain else _backend(later)
        self._first.encode_special_tokens = self._later.encode_special_tokens = True

    @property
    def size(self) -> int:
        """Ids run from 0 to size - 1; the file may leave some of them out."""
        return len(self._spellings)

    def encode(self, text: str, place: Place) -> list[int]:
        """Ids of literal text; a prefix meant for the first piece only does not follow a spelled-out BOS, as there."""
        return (self._first if place == "start" else self._later).encode(text, add_special_tokens=False).ids

    def token_bytes(self, token: int) -> bytes:
        """A special token's spelling, else the bytes that the file's decoder makes of the piece; b"" for a hole."""
        spelling = self._spellings[token]
        added = self._added.get(token)
        if added is not None and (added["special"] or self._to_bytes is _byte_level):
            return spelling.encode()
        return self._to_bytes(spelling)

    def files(self) -> dict[str, bytes]:
        """The `tokenizer.json` file, with what the settings changed of it."""
        return {"tokenizer.json": self._source.encode()}


def _parse(source: str) -> dict[str, Any]:
    try:
        layout = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"tokenizer.json is not JSON ({error}); fetch it again") from None
    if not isinstance(layout, dict) or not isinstance(layout.get("model"), dict):
        raise CheckpointError("tokenizer.json has no model section; expected a file written by the tokenizers package")
    for name, kind in (("added_tokens", list), ("decoder", dict)):
        if not isinstance(layout.get(name), kind | None):
            raise CheckpointError(f"tokenizer.json: {name} is a {type(layout[name]).__name__}, not a {kind.__name__}")
    for item in layout.get("added_tokens") or []:
        added_token(item, "tokenizer.json")
    _check_ids(layout)
    return {**layout, "truncation": None, "padding": None}


def _merged(layout: dict[str, Any], settings: TokenizerSettings) -> dict[str, Any]:
    """The file with the tokens that the settings add, and the flags that they override."""
    entries = {item["content"]: item for item in layout.get("added_tokens") or []}
    ids = _vocabulary(layout) | {spelling: item["id"] for spelling, item in entries.items()}
    merged, size = dict(entries), max(ids.values(), default=-1) + 1
    for token, added in sorted(settings.added.items()):
        expected = ids.setdefault(added.content, size)
        if token != expected:
            raise CheckpointError(
                f"token {added.content!r:.40} is added as {token}; tokenizer.json makes it {expected}"
            )
        size = max(size, token + 1)
        merged[added.content] = {"id": token, **asdict(added)}
    for spelling in settings.named | {settings.bos, settings.eos}:
        if spelling in merged:
            merged[spelling] = {**merged[spelling], "special": True}
        elif spelling in ids and spelling in (settings.bos, settings.eos):
            merged[spelling] = {"id": ids[spelling], **asdict(AddedToken(spelling, special=True))}
    for spelling in filter(None, (settings.bos, settings.eos, *settings.listed)):
        if spelling not in ids:
            raise CheckpointError(f"{CONFIG} names the token {spelling!r:.60}, which tokenizer.json does not hold")
    added = sorted(merged.values(), key=lambda item: item["id"])
    return layout if merged == entries else {**layout, "added_tokens": added}


def _vocabulary(layout: Mapping[str, Any]) -> dict[str, int]:
    """Ids by spelling, of the model alone: an object, or (Unigram) a list of pieces with their scores."""
    vocabulary = layout["model"].get("vocab")
    if isinstance(vocabulary, dict):
        return dict(vocabulary)
    return {str(entry[0]): token for token, entry in enumerate(vocabulary or []) if isinstance(entry, list) and entry}


def _backend(layout: Mapping[str, Any]) -> Backend:
    try:
        return Backend.from_str(json.dumps(layout))
    except Exception as error:  # the package raises bare Exception for every malformed file
        raise CheckpointError(f"tokenizer.json does not load: {error}") from None


def _added(backend: Backend, layout: Mapping[str, Any]) -> dict[int, Any]:
    """The file's added tokens by id. The package numbers them in order, whatever the file says: it must be the same."""
    added = {item["id"]: {**asdict(AddedToken("")), **item} for item in layout.get("added_tokens") or []}
    for token, item in added.items():
        if backend.token_to_id(item["content"]) != token:
            raise CheckpointError(
                f"tokenizer.json gives {item['content']!r:.40} the id {token}; by its place it is "
                f"{backend.token_to_id(item['content'])}"
            )
    return added


def _spellings(backend: Backend) -> list[str]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    spellings = [""] * (max(vocabulary.values(), default=-1) + 1)
    for spelling, token in vocabulary.items():
        spellings[token] = spelling
    return spellings


def _check_ids(layout: Mapping[str, Any]) -> None:
    """A vocabulary may have holes, but ids far beyond its size would take memory that the file does not account for."""
    vocabulary = layout["model"].get("vocab")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [item.get("id") for item in layout.get("added_tokens") or [] if isinstance(item, dict)]
    bound = 4 * len(ids) + 4096
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < bound:
            raise CheckpointError(f"tokenizer.json holds the id {token!r:.40}; expected whole numbers below {bound}")


# ---- pieces to bytes -------------------------------------------------------------------------------------------------


def byte_alphabet() -> dict[str, int]:
    """GPT-2's letter for each byte: itself where it prints in Latin-1, else the next free letter from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_ALPHABET = byte_alphabet()


def _byte_level(spelling: str) -> bytes:
    if all(letter in _ALPHABET for letter in spelling):
        return bytes(_ALPHABET[letter] for letter in spelling)
    return spelling.encode()


def _metaspace(spelling: str) -> bytes:
    return spelling.replace(METASPACE, " ").encode()


def _metaspace_or_byte(spelling: str) -> bytes:
    if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
        try:
            return bytes([int(spelling[3:5], 16)])
        except ValueError:
            return _metaspace(spelling)
    return _metaspace(spelling)


def _decoder(layout: Mapping[str, Any]) -> tuple[SpellingToBytes, bool]:
    """How pieces become bytes, and whether decoding takes one leading space away."""
    decoder: dict[str, Any] = layout.get("decoder") or {"type": "none"}
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, False
    if kinds == ["Metaspace"] and steps[0].get("replacement") == METASPACE:
        return _metaspace, steps[0].get("prepend_scheme", "always") != "never"
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _restores_spaces(steps[0]):
        if len(steps) == 3:
            return _metaspace_or_byte, False
        if len(steps) == 4 and _strips_one_space(steps[3]):
            return _metaspace_or_byte, True
    raise CheckpointError(f"tokenizer.json decodes with {kinds}; expected ByteLevel, Metaspace, or byte fallback")


def _restores_spaces(step: Mapping[str, Any]) -> bool:
    return step.get("pattern") == {"String": METASPACE} and step.get("content") == " "


def _strips_one_space(step: Mapping[str, Any]) -> bool:
    return step == {"type": "Strip", "content": " ", "start": 1, "stop": 0}


# ---- control tokens --------------------------------------------------------------------------------------------------


def _controls(backend: Backend, added: Mapping[int, Any], settings: TokenizerSettings) -> ControlTokens:
    special = {item["content"]: token for token, item in added.items() if item["special"]}
    markers = {
        item["content"]: token
        for token, item in added.items()
        if item["content"] not in special and is_marker(item["content"])
    }
    for item in added.values():
        if item["single_word"] and item["content"] in special | markers:
            raise CheckpointError(f"token {item['content']!r:.40} is a single_word; that is not implemented")
    leading = "".join(backend.encode("", add_special_tokens=True).tokens[:1])
    bos, adds_bos = settings.bos, settings.adds_bos
    if adds_bos is None:
        adds_bos = leading in special and leading == (bos or leading)
        bos = bos or (leading if adds_bos else "")
    strips = {item["content"]: (item["lstrip"], item["rstrip"]) for item in added.values()}
    return ControlTokens(special, markers, bos, settings.eos, bool(adds_bos and bos), strips)


def _without_reserved(layout: Mapping[str, Any], controls: ControlTokens) -> dict[str, Any]:
    """The same file with every reserved token marked special, so that `encode_special_tokens` turns them all off."""
    reserved = controls.special | controls.markers
    added = [{**item, "special": item["content"] in reserved} for item in layout.get("added_tokens") or []]
    return {**layout, "added_tokens": added}


def _without_first_prefix(layout: Mapping[str, Any]) -> dict[str, Any]:
    """The same file with `prepend_scheme: first` turned off: for text that is not the first piece."""
    section = layout.get("pre_tokenizer")
    if section and section["type"] == "Sequence":
        steps = [_never_prepend(step) for step in section["pretokenizers"]]
        return {**layout, "pre_tokenizer": {**section, "pretokenizers": steps}}
    return {**layout, "pre_tokenizer": section and _never_prepend(section)}


def _never_prepend(step: dict[str, Any]) -> dict[str, Any]:
    first = step["type"] == "Metaspace" and step.get("prepend_scheme") == "first"
    return {**step, "prepend_scheme": "never"} if first else step
