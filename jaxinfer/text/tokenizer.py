"""Text to token ids and back, from every kind of tokenizer file.

Knows: the rules that all kinds share (one BOS, control tokens are never spelled by a caller, ids in range), and which
codec reads which file. Does not know how a codec splits text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxinfer.errors import CheckpointError, RequestError
from jaxinfer.text.codec import Codec, Place
from jaxinfer.text.gguf_bpe import json_from_gguf
from jaxinfer.text.gguf_settings import gguf_settings, without_padding
from jaxinfer.text.json_codec import JsonCodec
from jaxinfer.text.reserved import ReservedTokens
from jaxinfer.text.sentencepiece_codec import SentencePieceCodec, model_from_gguf
from jaxinfer.text.settings import CONFIG, NOTHING_SAID, AddedToken, TokenizerSettings, read_settings


class TextTokenizer:
    """A codec with the shared rules on top; implements the `Tokenizer` protocol, whose docstrings hold here.

    `eos_ids` are ends of a text beside the codec's own.
    """

    def __init__(self, codec: Codec, *, eos_ids: Sequence[int] = ()) -> None:
        controls = codec.controls
        self._codec = codec
        self._special = controls.special
        self._special_ids = frozenset(controls.special.values())
        self._reserved = controls.special | controls.markers
        self._finder = ReservedTokens(self._reserved, controls.strips)
        self._bos = controls.special.get(controls.bos)
        self._adds_bos = controls.adds_bos and self._bos is not None
        self._eos_ids = frozenset(eos_ids) | {controls.special[eos] for eos in (controls.eos,) if eos}
        for token in self._eos_ids:
            if not (isinstance(token, int) and 0 <= token < codec.size):
                raise CheckpointError(f"end-of-text id {token} is no token; expected 0 to {codec.size - 1}")

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1."""
        return self._codec.size

    @property
    def bos_id(self) -> int | None:
        """The id put before a prompt, None where none is."""
        return self._bos if self._adds_bos else None

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that the tokenizer itself calls the end of text."""
        return self._eos_ids

    @property
    def special_tokens(self) -> dict[str, int]:
        """Control tokens by their spelling; not part of decoded text."""
        return self._special

    @property
    def reserved_tokens(self) -> dict[str, int]:
        """Special tokens and markers by their spelling; no caller's text becomes one."""
        return self._reserved

    @property
    def bos_token(self) -> str:
        """Spelling of BOS, whether or not it is added by default; "" for none."""
        return self._codec.controls.bos

    @property
    def eos_token(self) -> str:
        """Spelling of the end of text; "" for none."""
        return self._codec.controls.eos

    def encode(self, text: str, *, bos: bool = True, special: bool = False, sentinel: str = "") -> list[int]:
        """Ids of `text`; see the protocol. Raises RequestError for what is no string of Unicode characters."""
        _check_text(text)
        parts = self._finder.split(text) if special else [text]
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
                continue
            literal = part.replace(sentinel, "") if sentinel else part
            ids += self._codec.encode(literal, self._place(index, ids))
        if bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _place(self, part: int, before: list[int]) -> Place:
        if part == 0:
            return "start"
        return "after_bos" if part == 1 and before == [self._bos] else "inside"

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD. The space that encoding puts first is dropped again."""
        for token in ids:
            self._check_id(token)
        pieces = [
            b"" if skip_special and token in self._special_ids else self._codec.token_bytes(token) for token in ids
        ]
        first = 1 if len(ids) > 1 and ids[0] == self._bos else 0
        if self._codec.drops_space and first < len(ids) and ids[first] not in self._special_ids:
            pieces[first] = pieces[first].removeprefix(b" ")
        return b"".join(pieces).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one id. Raises RequestError for one out of range."""
        self._check_id(token)
        return self._codec.token_bytes(token)

    def _check_id(self, token: int) -> None:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._codec.size:
            raise RequestError(f"token id is {token!r:.40}; expected a whole number from 0 to {self._codec.size - 1}")

    def files(self) -> dict[str, bytes]:
        """File names and contents from which `load_tokenizer` makes an equal tokenizer."""
        config: dict[str, Any] = {
            "bos_token": self.bos_token or None,
            "eos_token": self.eos_token or None,
            "add_bos_token": self._adds_bos,
            "eos_token_ids": sorted(self._eos_ids),
        }
        files = self._codec.files()
        if "tokenizer.json" not in files and (flagged := self._stripping()):
            config["added_tokens_decoder"] = flagged
        return {**files, CONFIG: json.dumps(config, indent=2).encode()}

    def _stripping(self) -> dict[str, Any]:
        """The tokens that swallow white space, which a SentencePiece model has no field for."""
        tokens = ((spelling, *sides) for spelling, sides in self._codec.controls.strips.items() if any(sides))
        return {
            str(self._reserved[spelling]): asdict(AddedToken(spelling, spelling in self._special, left, right))
            for spelling, left, right in tokens
            if spelling in self._reserved
        }


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"text is of type {type(text).__name__}; expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"text holds a lone surrogate at character {error.start}; expected Unicode text") from None


# ---- files -----------------------------------------------------------------------------------------------------------


def from_sentencepiece(source: Path | str | bytes, settings: TokenizerSettings = NOTHING_SAID) -> TextTokenizer:
    """A SentencePiece `.model`, by path or content; BOS is added unless it has none or the settings forbid it."""
    model = source if isinstance(source, bytes) else _read(Path(source))
    return TextTokenizer(SentencePieceCodec(model, settings), eos_ids=settings.eos_ids)


def from_tokenizer_json(path: Path | str) -> TextTokenizer:
    """A `tokenizer.json`, or the directory that holds one; what stands beside it is honoured as `settings` tells.

    BOS is added where `add_bos_token` says so, or, without that field, where the file's post-processor does.
    """
    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    return _from_json(_decode(_read(path), path.name), read_settings(path.parent))


def _from_json(source: str, settings: TokenizerSettings) -> TextTokenizer:
    return TextTokenizer(JsonCodec(source, settings), eos_ids=settings.eos_ids)


def from_gguf(fields: Mapping[str, Any]) -> TextTokenizer:
    """The tokenizer inside a GGUF file, from its metadata as plain Python values.

    `tokenizer.ggml.model` gpt2 is byte-level BPE, llama is SentencePiece. A text ends with `eos_token_id`,
    `eot_token_id`, `eom_token_id`, and the control tokens that are known to end a turn. Raises CheckpointError for what
    is missing, damaged or of another kind.
    """
    kind, tokens = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"tokenizer.ggml.model is {kind!r:.40}; expected gpt2 or llama")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError("tokenizer.ggml.tokens is no list of strings; fetch the file again")
    fields = without_padding(fields)
    settings = gguf_settings(fields, fields["tokenizer.ggml.tokens"])
    if kind == "llama":
        return from_sentencepiece(model_from_gguf(fields), settings)
    return _from_json(json_from_gguf(fields), settings)


def load_tokenizer(directory: Path | str) -> TextTokenizer:
    """The tokenizer of a checkpoint directory: `tokenizer.json` where there is one, else `tokenizer.model`."""
    directory = Path(directory)
    if (directory / "tokenizer.json").is_file():
        return from_tokenizer_json(directory)
    if (directory / "tokenizer.model").is_file():
        return from_sentencepiece(directory / "tokenizer.model", read_settings(directory))
    if (directory / "tekken.json").is_file():
        raise CheckpointError(f"{directory.name} holds a tekken.json alone; put the model's tokenizer.json beside it")
    raise CheckpointError(f"{directory.name} holds no tokenizer; expected tokenizer.json or tokenizer.model")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from None


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name} is not UTF-8 ({error.reason}); fetch it again") from None
