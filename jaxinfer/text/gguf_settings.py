"""What a GGUF file's metadata says about its tokenizer beside the tokens: BOS, EOS, what ends a turn.

Knows: llama.cpp's names and its defaults for what a file leaves out. Source: `llama-vocab.cpp`. `add_eos_token` and
`add_sep_token` ask for tokens after a prompt, where nothing could follow them, and are not read.
"""

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import CheckpointError
from jaxinfer.text.gguf_bpe import CONTROL, PRES, USER_DEFINED
from jaxinfer.text.settings import AddedToken, TokenizerSettings

_UNUSED = 5
_LISTS = ("tokens", "scores", "token_type")
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>")
"""The metadata has one id for the end of a turn, and often none; what ends one is then known by its spelling."""
_HARMONY = ("<|return|>", "<|call|>")
"""With these two, `<|end|>` ends a message, after which the same turn goes on."""
_PHI3_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def without_padding(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the vocabulary cut where only converters' padding follows: unused tokens called `[PAD<id>]`.

    A Hugging Face tokenizer does not have them either, and an id beyond the tokenizer is never sampled.
    """
    tokens, kinds = (fields.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(kinds, list) or len(tokens) != len(kinds):
        return dict(fields)
    size = len(tokens)
    while size and kinds[size - 1] == _UNUSED and tokens[size - 1] == f"[PAD{size - 1}]":
        size -= 1
    lists = {f"tokenizer.ggml.{name}" for name in _LISTS}
    return {
        name: value[:size] if name in lists and isinstance(value, list) else value for name, value in fields.items()
    }


def gguf_settings(fields: Mapping[str, Any], tokens: list[str]) -> TokenizerSettings:
    """The metadata as settings. Raises CheckpointError for an id that is no token."""
    ids = {name: _id(fields, name, len(tokens)) for name in ("bos", "eos", "eot", "eom", "unknown")}
    pre = PRES.get(str(fields.get("tokenizer.ggml.pre")))
    by_default = _is_sentencepiece(fields) or (pre is not None and pre.adds_bos)
    ends = {token for name in ("eos", "eot", "eom") if (token := ids[name]) is not None}
    return TokenizerSettings(
        bos=_spelling(tokens, ids["bos"]),
        eos=_spelling(tokens, ids["eos"]),
        adds_bos=bool(fields.get("tokenizer.ggml.add_bos_token", by_default)),
        eos_ids=tuple(sorted(ends | _turn_ends(fields, tokens))),
        added=_stripping(fields, tokens) if _is_sentencepiece(fields) else {},
    )


def _is_sentencepiece(fields: Mapping[str, Any]) -> bool:
    return fields.get("tokenizer.ggml.model") == "llama"


def _id(fields: Mapping[str, Any], name: str, size: int) -> int | None:
    default = _SENTENCEPIECE_IDS.get(name) if _is_sentencepiece(fields) else None
    token = fields.get(f"tokenizer.ggml.{name}_token_id", default)
    if token is not None and not (isinstance(token, int) and 0 <= token < size):
        raise CheckpointError(f"tokenizer.ggml.{name}_token_id is {token!r:.40}; expected 0 to {size - 1}")
    return token


def _spelling(tokens: list[str], token: int | None) -> str:
    return "" if token is None else tokens[token]


def _of_kinds(fields: Mapping[str, Any], tokens: list[str], *kinds: int) -> dict[str, int]:
    """Ids by spelling of the tokens that are of one of these kinds."""
    types = fields.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        return {}  # whoever builds the tokenizer refuses the file
    return {spelling: i for i, (spelling, kind) in enumerate(zip(tokens, types, strict=True)) if kind in kinds}


def _turn_ends(fields: Mapping[str, Any], tokens: list[str]) -> set[int]:
    control = _of_kinds(fields, tokens, CONTROL)
    found = {spelling: control[spelling] for spelling in _TURN_ENDS if spelling in control}
    if all(spelling in found for spelling in _HARMONY):
        found.pop("<|end|>", None)
    return set(found.values())


def _stripping(fields: Mapping[str, Any], tokens: list[str]) -> dict[int, AddedToken]:
    """Phi-3's control tokens swallow the white space after them, which a GGUF file has no field for."""
    name = str(fields.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return {}
    control = _of_kinds(fields, tokens, CONTROL)
    found = control | _of_kinds(fields, tokens, USER_DEFINED)
    return {
        token: AddedToken(spelling, special=spelling in control, rstrip=True)
        for spelling, token in found.items()
        if spelling not in _PHI3_KEEP_SPACE
    }
