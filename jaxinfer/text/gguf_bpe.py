"""Byte-level BPE as GGUF files embed it, rebuilt as a `tokenizer.json`.

Knows: the pre-tokenizers behind the names in `tokenizer.ggml.pre`. Sources: llama.cpp's `llama-vocab.cpp` for names and
regular expressions, and the `tokenizer.json` of the models those names stand for. Where the two differ, the model's own
file is right: it was trained with that. A name that is not listed, or none, is an error, since any guess would give
plausible ids that are wrong here and there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxinfer.errors import CheckpointError

CONTROL, USER_DEFINED = 3, 4

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    """GPT-4's expression (cl100k), with so many digits together."""
    return rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}"


def _cased_words(contraction: str, digits: str) -> str:
    """GPT-4o's expression (o200k), which ends a word where capitals begin."""
    mixed = f"{_LEAD}{_UPPER}*{_LOWER}+{contraction}|{_LEAD}{_UPPER}+{_LOWER}*{contraction}"
    return rf"{mixed}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"


_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _SPACES,
)


@dataclass(frozen=True, slots=True)
class Pre:
    """What a name stands for: expressions that cut the text one after the other, and switches.

    gpt2: cut by GPT-2's own expression at the end. nfc: characters are composed first. whole_words: a word that is in
    the vocabulary is taken as it is, whatever the merges would make of it. adds_bos: unless the file says otherwise.
    """

    splits: tuple[str, ...] = ()
    gpt2: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> Any:
        """The same for the `tokenizers` package, its last step the letters that stand for bytes."""
        steps = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)])


_GPT2 = Pre(gpt2=True)
_SINGLE_DIGITS = Pre((r"\p{N}",), gpt2=True)
_LLAMA3 = Pre((_words("{1,3}"),), whole_words=True, adds_bos=True)
_GPT4 = Pre((_words("{1,3}"),))
_QWEN2 = Pre((_words(""),), nfc=True)

PRES = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,  # Granite 3
    "starcoder": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _GPT4,  # SmolLM3
    "dbrx": _GPT4,  # Phi-4, OLMo 2, Granite 4
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": Pre(_DEEPSEEK),
    "gpt-4o": Pre((_cased_words(f"{_CONTRACTION}?", "{1,3}"),), whole_words=True),  # gpt-oss, Phi-4 mini
    "tekken": Pre((_cased_words("", ""),), whole_words=True, adds_bos=True),  # Mistral NeMo and later
}


def json_from_gguf(fields: Mapping[str, Any]) -> str:
    """`tokenizer.json` of a GGUF file's tokens, merges and token types. Raises CheckpointError for an unknown `pre`."""
    pre = PRES.get(str(name := fields.get("tokenizer.ggml.pre")))
    if pre is None:
        raise CheckpointError(f"tokenizer.ggml.pre is {name!r:.40}; expected one of {', '.join(sorted(PRES))}")
    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = {spelling: index for index, spelling in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.tokens repeats {len(tokens) - len(vocabulary)} spellings; expected none")
    backend = Tokenizer(_model(vocabulary, fields, pre.whole_words))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_added(tokens, fields.get("tokenizer.ggml.token_type")))
    return backend.to_str()


def _model(vocabulary: dict[str, int], fields: Mapping[str, Any], whole_words: bool) -> Any:
    try:
        merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
        return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words)
    except Exception as error:  # the package raises bare Exception for a merge whose parts are no tokens
        raise CheckpointError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from None


def _added(tokens: list[str], kinds: Any) -> list[AddedToken]:
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.token_type is {kinds!r:.40}; expected a type for each of {len(tokens)} tokens"
        )
    return [
        AddedToken(spelling, special=kind == CONTROL, normalized=False)
        for spelling, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
