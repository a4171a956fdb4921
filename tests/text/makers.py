"""Small tokenizers with the structure of each family's published files, as `tokenizer.json` and as GGUF metadata.

The regular expressions are written out as those files have them. What differs from the real ones is the vocabulary: a
few hundred pieces, trained here.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HARD = [
    "",
    " ",
    "The quick brown fox isn't over'LL, 'S and we'VE gone; I'm ’s",
    "한국어 문장, 토큰화 테스트! 뷁",
    "中文，测试。日本語のテキスト・カタカナ「括弧」",
    "👩‍👩‍👧‍👦 🏳️‍🌈👍🏽🇰🇷🙂",
    "e\u0301a\u0308\u0323 \u0915\u094d\u0937 \u0e01\u0e33 ﬁ Å \u212b",
    "1234567 3.14159 1,000,000 ٠١٢٣ ४५६ １２３ ½² Ⅷ",
    "def f(x):\n\treturn x**2  # ok\r\n    if a<=b: {}[]; //\n\n\n",
    "   \t\t \n\n\r\n\r \u00a0\u2003\u3000\u2028\u0085\x1c\x1f end  ",
    "HTTPServer camelCase iPhone snake_case ÀÉîøß Ǆǅǆ ΩΜέγα ПРИвет",
    "!@#$%^&*()_+-=[]{}|;:',.<>/?`~ …—“” $x,y /path/to",
    "\0\x01\x7f\ufffd\ufeff\u200b\u200d",
    "<0x41> <|im_end|> </s> <think> [INST]",
    "};\n//x };\r\n//y };\n/z",
    "a zzyzx, zzyzx",
]
WHOLE_WORD = "Ġzzyzx"
"""In every byte-level vocabulary, and made by no merge: only who takes whole words as they are finds it."""
TRAINING = [
    *HARD[:-1],
    "the and of to in is it that 안녕하세요 hello world 123 456 return def class import };\n// " * 8,
] * 3


def letters() -> str:
    return "".join(sorted(set("".join(HARD))))


WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
HARMONY = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
    " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)


def splits(*expressions: str) -> Any:
    steps = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in expressions]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def single_digits() -> Any:
    """As SmolLM2 and Granite 3 ship it."""
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return pre_tokenizers.Sequence(steps)


def special(*spellings: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(spelling, special=True, normalized=False, **flags) for spelling in spellings]


def markers(*spellings: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(spelling, special=False, normalized=False, **flags) for spelling in spellings]


@dataclass(frozen=True)
class Shape:
    """How a family cuts text. pre: its name in GGUF. bos, eos: of the added tokens. config: tokenizer_config.json's."""

    pre_tokenizer: Callable[[], Any]
    pre: str
    added: list[AddedToken]
    bos: str = ""
    eos: str = ""
    normalizer: Callable[[], Any] | None = None
    whole_words: bool = False
    template: bool = False
    config: dict[str, Any] = field(default_factory=dict)


CHATML = special("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = special("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|reserved_special_token_0|>")
HARMONY_TOKENS = special(
    *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>"),
    *("<|end|>", "<|message|>", "<|call|>"),
)
DEEPSEEK_TOKENS = [
    *special("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"),
    *markers("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
]
GRANITE = special("<|end_of_text|>", "<fim_prefix>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")

BYTE_LEVEL = {
    "llama": Shape(
        lambda: splits(WORDS), "llama-bpe", LLAMA3, "<|begin_of_text|>", "<|eot_id|>", whole_words=True, template=True
    ),
    "qwen2": Shape(
        lambda: splits(QWEN),
        "qwen2",
        [*CHATML, *markers("<tool_call>", "</tool_call>")],
        eos="<|im_end|>",
        normalizer=normalizers.NFC,
        config={"add_bos_token": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
    ),
    "qwen3": Shape(
        lambda: splits(QWEN),
        "qwen2",
        [*CHATML, *markers("<tool_call>", "</tool_call>", "<think>", "</think>")],
        eos="<|im_end|>",
        normalizer=normalizers.NFC,
        config={"add_bos_token": False},
    ),
    "phi4": Shape(
        lambda: splits(WORDS),
        "dbrx",
        special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"),
        "<|endoftext|>",
        "<|im_end|>",
        config={"add_bos_token": False},
    ),
    "olmo2": Shape(
        lambda: splits(WORDS),
        "dbrx",
        [*special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"), *markers("|||EMAIL_ADDRESS|||", "   ")],
        "<|endoftext|>",
        "<|endoftext|>",
        config={"add_bos_token": False},
    ),
    "smollm3": Shape(
        lambda: splits(WORDS),
        "smaug-bpe",
        [*LLAMA3, *special("<|im_start|>", "<|im_end|>"), *markers("<think>", "</think>")],
        eos="<|im_end|>",
    ),
    "granite": Shape(
        single_digits, "refact", GRANITE, "<|end_of_text|>", "<|end_of_text|>", config={"add_bos_token": False}
    ),
    "gpt_oss": Shape(
        lambda: splits(HARMONY), "gpt-4o", HARMONY_TOKENS, "<|startoftext|>", "<|return|>", whole_words=True
    ),
    "deepseek_v3": Shape(
        lambda: splits(*DEEPSEEK),
        "deepseek-v3",
        DEEPSEEK_TOKENS,
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        config={"add_bos_token": True, "add_eos_token": False},
    ),
    "mistral": Shape(
        lambda: splits(TEKKEN),
        "tekken",
        special("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
        "<s>",
        "</s>",
        whole_words=True,
        template=True,
    ),
    "smollm": Shape(single_digits, "smollm", CHATML, "<|im_start|>", "<|im_end|>", config={"add_bos_token": False}),
}
"""By family; `mistral` as from NeMo on."""


@cache
def byte_level(name: str) -> str:
    """`tokenizer.json` of the shape `name`."""
    shape = BYTE_LEVEL[name]
    backend = Tokenizer(models.BPE(ignore_merges=shape.whole_words))
    backend.normalizer = shape.normalizer() if shape.normalizer else None
    backend.pre_tokenizer = shape.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TRAINING, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    backend = with_whole_word(backend)
    backend.add_tokens(shape.added)
    if shape.template:
        tokens = [(shape.bos, backend.token_to_id(shape.bos))]
        backend.post_processor = processors.TemplateProcessing(f"{shape.bos} $A", f"{shape.bos} $A $B", tokens)
    return backend.to_str()


def with_whole_word(backend: Tokenizer) -> Tokenizer:
    layout = json.loads(backend.to_str())
    vocabulary = layout["model"]["vocab"]
    vocabulary[WHOLE_WORD] = len(vocabulary)
    return Tokenizer.from_str(json.dumps(layout))


def byte_level_config(name: str) -> dict[str, Any]:
    """`tokenizer_config.json` of the shape `name`."""
    shape = BYTE_LEVEL[name]
    return {"bos_token": shape.bos or None, "eos_token": shape.eos, **shape.config}


def gguf_of_byte_level(name: str) -> dict[str, Any]:
    """What llama.cpp's converter makes of it, with padding up to a vocabulary that the model has rounded up."""
    shape, layout = BYTE_LEVEL[name], json.loads(byte_level(name))
    added = {item["id"]: item for item in layout["added_tokens"]}
    spelled = {token: spelling for spelling, token in layout["model"]["vocab"].items()}
    spelled |= {token: item["content"] for token, item in added.items()}
    tokens = [spelled.get(token, f"[PAD{token}]") for token in range(len(spelled) + 5)]
    kinds = [(3 if added[token]["special"] else 4) if token in added else 1 for token in range(len(spelled))] + [5] * 5
    ids = {spelling: token for token, spelling in spelled.items()}
    fields = {
        "model": "gpt2",
        "pre": shape.pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": [" ".join(merge) for merge in layout["model"]["merges"]],
        "eos_token_id": ids[shape.eos],
        "add_bos_token": shape.template or shape.config.get("add_bos_token", False),
    } | ({"bos_token_id": ids[shape.bos]} if shape.bos else {})
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


# ---- pieces with U+2581, and bytes for what no piece spells ----------------------------------------------------------


PHI3 = [
    *special("<unk>", "<s>"),
    *markers("</s>", rstrip=True),
    *special("<|endoftext|>"),
    *special("<|assistant|>", "<|system|>", "<|end|>", "<|user|>", rstrip=True),
]
PIECES = {
    "llama": special("<unk>", "<s>", "</s>"),
    "mistral": special("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
    "gemma": [
        *special("<pad>", "<eos>", "<bos>", "<unk>"),
        *special("<start_of_turn>", "<end_of_turn>"),
        *markers("<unused0>", "\n\n", "\n\n\n", "<table>"),
    ],
    "phi3": PHI3,
}
"""Added tokens by family; `llama` as Llama 2, `mistral` as its first three versions."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def pieces_of(name: str) -> list[str]:
    """The vocabulary: added tokens, bytes, then pieces from the best on."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    vocabulary = backend.get_vocab()
    learned = sorted(vocabulary, key=vocabulary.__getitem__)
    order = [piece for piece in learned if len(piece) > 1] + [piece for piece in learned if len(piece) == 1]
    first = [token.content for token in PIECES[name]]
    return [*first, *BYTES, *(piece for piece in order if piece not in first and "\0" not in piece)]


def merges_of(pieces: list[str]) -> Iterator[tuple[str, str]]:
    """Every way to put a piece together, the best piece first: SentencePiece's scores as converters write them."""
    known = set(pieces)
    for piece in pieces:
        for cut in range(1, len(piece)):
            if piece[:cut] in known and piece[cut:] in known:
                yield piece[:cut], piece[cut:]


@cache
def with_pieces(name: str) -> str:
    """`tokenizer.json` of the family `name`."""
    pieces = pieces_of(name)
    plain = [piece for piece in pieces[len(PIECES[name]) + 256 :] if piece]
    model = models.BPE(
        {piece: token for token, piece in enumerate(pieces)},
        list(merges_of(plain)),
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if name == "gemma":
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
        steps.pop()
    elif name == "mistral":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(steps)
    bos = "<bos>" if name == "gemma" else "<s>"
    tokens = [(bos, backend.token_to_id(bos))]
    backend.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A $B", tokens)
    backend.add_tokens(PIECES[name])
    return backend.to_str()


def gguf_of_pieces(name: str) -> dict[str, Any]:
    """What llama.cpp's converter makes of the SentencePiece model behind it, padded."""
    pieces, added = pieces_of(name), PIECES[name]
    kinds = [3 if token.special else 4 for token in added] + [6] * 256 + [1] * (len(pieces) - 256 - len(added))
    ids = {piece: token for token, piece in enumerate(pieces)}
    bos, eos = {"gemma": ("<bos>", "<eos>"), "phi3": ("<s>", "<|endoftext|>")}.get(name, ("<s>", "</s>"))
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": [*pieces, *(f"[PAD{token}]" for token in range(len(pieces), len(pieces) + 3))],
        "scores": [0.0] * (256 + len(added))
        + [-float(token) for token in range(len(pieces) - 256 - len(added))]
        + [0.0] * 3,
        "token_type": [*kinds, 5, 5, 5],
        "bos_token_id": ids[bos],
        "eos_token_id": ids[eos],
        "unknown_token_id": ids["<unk>"],
        "add_bos_token": True,
        "add_space_prefix": name != "gemma",
    }
    return {"general.name": f"Tiny {name} instruct"} | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def scrambled(seed: int, spellings: list[str]) -> list[str]:
    """Hard texts cut and joined at random, control tokens between them."""
    chance = random.Random(seed)
    parts = [*HARD, *(text[:7] for text in HARD), *spellings, *(f" {spelling}\n" for spelling in spellings)]
    return ["".join(chance.choices(parts, k=chance.randint(1, 5))) for _ in range(60)]
