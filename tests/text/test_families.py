"""Each family's tokenizer: the same ids from our files, from GGUF metadata and from the `tokenizers` package itself."""

import json
import random
import unicodedata
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.gguf_bpe import PRES
from jaxinfer.text.tokenizer import TextTokenizer, from_gguf, load_tokenizer

from . import makers

FAMILIES = {"phi4": ["phi3"], "qwen3": ["qwen3", "qwen3_moe"], "mistral": ["mistral", "mixtral"], "smollm": ["llama"]}
FAMILIES["gemma"] = ["gemma", "gemma2", "gemma3"]
"""Families that come with a tokenizer of this shape, where that is not the one of the same name."""
KINDS = [*makers.BYTE_LEVEL, *(f"{name} pieces" for name in makers.PIECES)]
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=30) | st.text(
    st.sampled_from(makers.letters()), max_size=60
)


def name_of(kind: str) -> str:
    return kind.removesuffix(" pieces")


def marked(kind: str, what: str) -> object:
    families = FAMILIES.get(name_of(kind), [name_of(kind)])
    return pytest.param(kind, marks=[pytest.mark.proves(family=family, what=what) for family in families])


ALL = pytest.mark.parametrize("kind", [marked(kind, "tokenizer") for kind in KINDS])


@cache
def source(kind: str) -> str:
    return makers.byte_level(kind) if kind in makers.BYTE_LEVEL else makers.with_pieces(name_of(kind))


@cache
def library(kind: str) -> Backend:
    return Backend.from_str(source(kind))


@cache
def ours(kind: str) -> TextTokenizer:
    with TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(source(kind))
        if kind in makers.BYTE_LEVEL:
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps(makers.byte_level_config(kind)))
        return load_tokenizer(folder)


@cache
def of_gguf(kind: str) -> TextTokenizer:
    fields = makers.gguf_of_byte_level(kind) if kind in makers.BYTE_LEVEL else makers.gguf_of_pieces(name_of(kind))
    return from_gguf(fields)


def scrambled(kind: str) -> list[str]:
    return [*makers.HARD, *makers.scrambled(len(kind), list(ours(kind).reserved_tokens))]


@ALL
def test_ids_are_those_of_the_library(kind: str):
    """Control tokens and the white space round them included."""
    for text in scrambled(kind):
        expected = library(kind).encode(text, add_special_tokens=False).ids
        assert ours(kind).encode(text, bos=False, special=True) == expected, text


def alike(kind: str, text: str) -> bool:
    """Whether both files mean the same ids; SentencePiece puts a space before a text that begins with one, too."""
    return kind != "mistral pieces" or not text.startswith(" ")


@ALL
def test_ids_of_the_gguf_file_are_those_of_the_json_file(kind: str):
    for text in filter(lambda text: alike(kind, text), scrambled(kind)):
        assert of_gguf(kind).encode(text) == ours(kind).encode(text), text


@pytest.mark.parametrize("kind", [*makers.BYTE_LEVEL, "gemma pieces"])
def test_control_tokens_of_the_gguf_file_are_those_of_the_json_file(kind: str):
    """Where a space goes first, the files differ in what comes after a control token."""
    for text in scrambled(kind):
        assert of_gguf(kind).encode(text, special=True) == ours(kind).encode(text, special=True), text


@ALL
@given(text=TEXTS)
@settings(max_examples=40)
def test_any_text_has_the_same_ids_everywhere(kind: str, text: str):
    ids = ours(kind).encode(text, bos=False)
    assert ids == of_gguf(kind).encode(text, bos=False) or not alike(kind, text)
    if not any(token in text for token in ours(kind).reserved_tokens):
        assert ids == library(kind).encode(text, add_special_tokens=False).ids


@ALL
@given(text=TEXTS)
@settings(max_examples=40)
def test_text_survives(kind: str, text: str):
    """Qwen composes characters, and Metaspace puts no space before a text that begins with one: both as trained."""
    expected = unicodedata.normalize("NFC", text) if "qwen" in kind else text
    for tokenizer in (ours(kind), of_gguf(kind)):
        found = tokenizer.decode(tokenizer.encode(text))
        assert found == expected or (kind == "mistral pieces" and found == text.removeprefix(" "))


@ALL
def test_streamed_text_is_the_text_at_once(kind: str):
    chance = random.Random(5)
    for tokenizer in (ours(kind), of_gguf(kind)):
        for _ in range(60):
            ids = chance.choices(range(tokenizer.vocab_size), k=12)
            detokenizer = Detokenizer(tokenizer, [])
            assert "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish() == tokenizer.decode(ids)
            assert tokenizer.decode(ids) == ours(kind).decode(ids)


@ALL
def test_bos_eos_and_size_are_the_same_from_both_files(kind: str):
    json_file, gguf_file = ours(kind), of_gguf(kind)
    for what in ("bos_id", "vocab_size", "special_tokens", "reserved_tokens"):
        assert getattr(json_file, what) == getattr(gguf_file, what), what
    if kind in makers.BYTE_LEVEL:
        shape = makers.BYTE_LEVEL[kind]
        assert (json_file.bos_token, json_file.eos_token) == (shape.bos, shape.eos)
        assert (gguf_file.bos_token, gguf_file.eos_token) == (shape.bos, shape.eos)
        assert json_file.eos_ids <= gguf_file.eos_ids


@pytest.mark.parametrize("kind", [kind for kind in KINDS if ours(kind).bos_id is not None])
def test_who_adds_bos_adds_one(kind: str):
    tokenizer = ours(kind)
    for text in ("Hello", tokenizer.bos_token + "Hello"):
        ids = tokenizer.encode(text, special=True)
        assert ids[0] == tokenizer.bos_id
        assert ids.count(ids[0]) == 1


def test_who_wants_bos_gets_one():
    """Qwen, Granite, SmolLM, OLMo 2, Phi-4 and gpt-oss are trained without one."""
    with_bos = {kind for kind in KINDS if ours(kind).bos_id is not None}
    assert with_bos == {"llama", "deepseek_v3", "mistral", *(f"{name} pieces" for name in makers.PIECES)}


@pytest.mark.parametrize("kind", ["qwen3", "smollm3", "deepseek_v3"])
def test_markers_show_and_special_tokens_do_not(kind: str):
    tokenizer = ours(kind)
    ids = tokenizer.encode(f"<think>a</think>{tokenizer.eos_token}", special=True, bos=False)
    assert tokenizer.decode(ids) == "<think>a</think>"


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("llama", ["<|eot_id|>"]),
        ("qwen2", ["<|im_end|>"]),
        ("gpt_oss", ["<|call|>", "<|return|>"]),  # <|end|> ends one of the messages of a turn
        ("gemma pieces", ["<end_of_turn>", "<eos>"]),
        ("phi3 pieces", ["<|end|>", "<|endoftext|>"]),
    ],
)
def test_what_ends_a_turn_is_known_without_a_generation_config(kind: str, ends: list[str]):
    tokenizer = of_gguf(kind)
    assert tokenizer.eos_ids == {tokenizer.special_tokens[end] for end in ends}


@pytest.mark.parametrize("kind", makers.BYTE_LEVEL)
def test_a_whole_word_without_merges_is_found_by_some(kind: str):
    word = library(kind).token_to_id(makers.WHOLE_WORD)
    found = word in of_gguf(kind).encode("a zzyzx")
    assert found is (kind in ("llama", "gpt_oss", "mistral"))


def test_every_pre_tokenizer_name_is_proven():
    """Aliases stand for the very same switches."""
    proven = {shape.pre for shape in makers.BYTE_LEVEL.values()}
    assert {name for name, pre in PRES.items() if not any(PRES[other] == pre for other in proven)} == {"gpt-2", "gpt2"}
