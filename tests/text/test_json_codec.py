"""`tokenizer.json` in the shapes that published checkpoints use, on vocabularies small enough to read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxinfer.errors import CheckpointError
from jaxinfer.text.tokenizer import TextTokenizer, from_tokenizer_json, load_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def llama_style() -> Tokenizer:
    """As Llama 2 and Mistral ship it: spaces as U+2581, one put first, bytes for what is not in the vocabulary."""
    spellings = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
    vocabulary = {spelling: token for token, spelling in enumerate(spellings)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace_style() -> Tokenizer:
    """As newer conversions ship it: the first piece alone gets a space."""
    backend = llama_style()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


Load = Callable[..., TextTokenizer]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def write(backend: Tokenizer, **config: object) -> TextTokenizer:
        backend.save(str(tmp_path / "tokenizer.json"))
        if config:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return load_tokenizer(tmp_path)

    return write


TEXTS = st.text(alphabet="ab é🙂", max_size=12)


@pytest.mark.parametrize("style", [llama_style, metaspace_style])
def test_equal_to_the_library(load: Load, style: Callable[[], Tokenizer]):
    library, tokenizer = style(), load(style())

    @given(TEXTS)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == library.encode(text).ids
        assert tokenizer.decode(ids) == library.decode(ids)
        # Metaspace puts no space before a text that begins with one, and takes one away all the same
        assert tokenizer.decode(ids) == (text if style is llama_style else text.removeprefix(" "))

    check()


def test_bos_comes_from_the_post_processor(load: Load):
    tokenizer = load(llama_style())
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_ids) == (
        1,
        "<s>",
        "",
        frozenset(),
    )


def test_the_config_overrides_the_post_processor(load: Load):
    entry = {"content": "</s>", "lstrip": False}
    tokenizer = load(llama_style(), add_bos_token=False, bos_token="<s>", eos_token=entry)
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.eos_ids) == (None, "<s>", frozenset({2}))
    assert tokenizer.encode("ab") == [tokenizer.vocab_size - 1]


def test_the_config_adds_a_bos_that_the_post_processor_lacks(load: Load):
    backend = llama_style()
    backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    assert load(backend, add_bos_token=True, bos_token="<s>").bos_id == 1


def test_a_post_processor_that_adds_an_end_is_not_followed(load: Load):
    backend = llama_style()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="$A $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert load(backend).encode("ab") == [1, 265]


@pytest.mark.parametrize("style", [llama_style, metaspace_style])
def test_pieces_between_control_tokens_equal_the_library(load: Load, style: Callable[[], Tokenizer]):
    """Also after a BOS in the text, where the library adds a space or not as the file says."""
    library, tokenizer = style(), load(style())
    for text in ("ab</s> a</s>b", "<s>ab", "<s> ab</s>", "</s>a"):
        assert tokenizer.encode(text, special=True, bos=False) == library.encode(text, add_special_tokens=False).ids


def test_byte_tokens_are_bytes(load: Load):
    tokenizer = load(llama_style())
    assert [tokenizer.token_bytes(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.decode([3 + byte for byte in "한".encode()]) == "한"
    assert tokenizer.encode("<0x41>", bos=False)[1:] == [3 + byte for byte in b"<0x41>"]


def test_white_space_round_control_tokens_goes_as_the_file_says(load: Load):
    backend = metaspace_style()
    backend.add_special_tokens([AddedToken("<|end|>", rstrip=True, special=True)])
    tokenizer = load(backend)
    assert tokenizer.encode("a<|end|>\n b", special=True) == backend.encode("a<|end|>\n b").ids


def test_a_marker_that_is_not_special_cannot_be_spelled(load: Load):
    backend = metaspace_style()
    backend.add_tokens(["<tool>", "▁▁"])
    tokenizer = load(backend)
    marker = tokenizer.reserved_tokens["<tool>"]
    assert marker not in tokenizer.encode("a <tool>")
    assert tokenizer.decode(tokenizer.encode("a <tool>")) == "a <tool>"
    assert tokenizer.encode("a<tool>", special=True)[-1] == marker
    assert tokenizer.decode([marker]) == "<tool>"


def test_nothing_is_truncated_or_padded(load: Load):
    backend = llama_style()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert load(backend).decode(load(backend).encode("ab " * 20)) == "ab " * 20


def test_a_decoder_without_bytes_of_its_own_is_refused(load: Load):
    backend = llama_style()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        load(backend)
    backend.decoder = decoders.Sequence([decoders.Fuse()])
    with pytest.raises(CheckpointError, match="Fuse"):
        load(backend)


@pytest.mark.parametrize("token", [2**31, 2**63, -1, "1", None])
def test_ids_far_beyond_the_vocabulary_are_refused(tmp_path: Path, token: object):
    layout = {"model": {"type": "BPE", "vocab": {"a": 0, "b": token}, "merges": []}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    with pytest.raises(CheckpointError, match="holds the id"):
        load_tokenizer(tmp_path)


def test_a_hole_in_the_ids_has_no_bytes(tmp_path: Path):
    backend = Tokenizer(models.BPE({"a": 0, "b": 3}, []))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = from_tokenizer_json(tmp_path / "tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.decode([0, 1, 2, 3])) == (4, "ab")
