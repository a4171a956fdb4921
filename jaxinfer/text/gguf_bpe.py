"""Byte-level BPE as GGUF files embed it, rebuilt as a `tokenizer.json`.

Knows: the pre-tokenizers behind the names in `tokenizer.ggml.pre`. Source: the tokenizers of the models that llama.cpp
gave those names to.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxinfer.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> Any:
    split = pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_SPLITS = {
    "gpt2": _gpt2,
    "gpt-2": _gpt2,
    "default": _gpt2,
    "smollm": _single_digits,
    "llama-bpe": lambda: _words("{1,3}"),
    "llama3": lambda: _words("{1,3}"),
    "qwen2": lambda: _words(""),
}
_WHOLE_WORDS = ("llama-bpe", "llama3")
"""These take a word that is in the vocabulary as it is, whatever the merges would make of it."""


def json_from_gguf(fields: Mapping[str, Any]) -> str:
    """`tokenizer.json` of a GGUF file's tokens, merges and token types. Raises CheckpointError for an unknown `pre`."""
    name = fields.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise CheckpointError(f"tokenizer.ggml.pre is {name!r:.40}; expected one of {sorted(_SPLITS)}")
    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = {spelling: index for index, spelling in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.tokens repeats {len(tokens) - len(vocabulary)} spellings; expected none")
    backend = Tokenizer(_model(vocabulary, fields, name in _WHOLE_WORDS))
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _SPLITS[name]()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_added(tokens, fields.get("tokenizer.ggml.token_type", ())))
    return backend.to_str()


def _model(vocabulary: dict[str, int], fields: Mapping[str, Any], whole_words: bool) -> Any:
    try:
        merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
        return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words)
    except Exception as error:  # the package raises bare Exception for a merge whose parts are no tokens
        raise CheckpointError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from None


def _added(tokens: list[str], kinds: Any) -> list[AddedToken]:
    return [
        AddedToken(spelling, special=kind == _CONTROL, normalized=False)
        for spelling, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
