"""What stands beside a tokenizer: each rule as transformers 5.24 follows it (measured), or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel

from jaxinfer.errors import CheckpointError
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.gguf_settings import without_padding
from jaxinfer.text.tokenizer import TextTokenizer, from_gguf, load_tokenizer

from . import makers


def base() -> dict[str, Any]:
    """A byte-level `tokenizer.json` with <s> 256, </s> 257, <m> 258 (no special token) and <n> 259."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevel()
    plain = AddedToken("<m>", special=False, normalized=False)
    backend.add_tokens([*makers.special("<s>", "</s>"), plain, *makers.special("<n>")])
    return json.loads(backend.to_str())


Load = Callable[..., TextTokenizer]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def write(config: Any = None, *, layout: Any = None, **files: Any) -> TextTokenizer:
        contents = {"tokenizer": layout or base(), **({} if config is None else {"tokenizer_config": config}), **files}
        for name, content in contents.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return load_tokenizer(tmp_path)

    return write


def token(content: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    off = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content, "special": special, **off, **flags}


def shown(tokenizer: TextTokenizer) -> str:
    return tokenizer.decode(range(256, tokenizer.vocab_size))


def test_nothing_beside_it(load: Load):
    tokenizer = load()
    assert shown(tokenizer) == "<m>"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.bos_id) == ("", "", None)


@pytest.mark.parametrize("eos", ["</s>", token("</s>"), {"__type": "AddedToken", "content": "</s>"}])
def test_a_name_is_a_string_or_an_object(load: Load, eos: Any):
    assert load({"eos_token": eos}).eos_ids == {257}


@pytest.mark.parametrize(
    "config", [{"bos_token": "<m>"}, {"image_token": "<m>"}, {"extra_special_tokens": {"image_token": "<m>"}}]
)
def test_a_token_with_a_name_is_special(load: Load, config: Any):
    assert shown(load(config)) == ""


@pytest.mark.parametrize("name", ["additional_special_tokens", "extra_special_tokens"])
def test_a_token_that_is_merely_listed_keeps_its_flag(load: Load, name: str):
    assert shown(load({name: ["<m>", "<n>"]})) == "<m>"


@pytest.mark.parametrize("entries", [["<nowhere>"], [token("<nowhere>")]])
def test_a_listed_token_must_exist(load: Load, entries: Any):
    with pytest.raises(CheckpointError, match="<nowhere>"):
        load({"additional_special_tokens": entries})


def test_other_names_may_name_what_is_not_there(load: Load):
    """Fine-tuned checkpoints name padding tokens that neither the tokenizer nor the model has."""
    assert load({"pad_token": "[PAD]", "unk_token": None}).vocab_size == 260


def test_added_tokens_decoder_overrides_flags(load: Load):
    tokenizer = load({"added_tokens_decoder": {"258": token("<m>"), "259": token("<n>", special=False, rstrip=True)}})
    assert shown(tokenizer) == "<n>"
    assert tokenizer.encode("<n> \n x", special=True) == [259, *tokenizer.encode("x")]


def test_added_tokens_decoder_adds_at_the_end(load: Load):
    tokenizer = load({"added_tokens_decoder": {"261": token("<q>", special=False), "260": token("<p>")}})
    assert tokenizer.encode("<p>a<q>", special=True) == [260, *tokenizer.encode("a"), 261]
    assert tokenizer.decode([260, 261]) == "<q>"


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ({"300": token("<p>")}, "added as 300"),
        ({"65": token("<p>")}, "added as 65"),
        ({"257": token("<m>")}, "added as 257"),
        ({"258": token("<m>", single_word=True)}, "single_word"),
        ({"x": token("<m>")}, "the id 'x'"),
        ({"-1": token("<m>")}, "the id '-1'"),
        ({"258": "<m>"}, "<m>"),
        ({"258": {"special": True}}, "special"),
        ({"258": token("<m>") | {"special": 1}}, "special of token '<m>' is 1"),
        ({"258": token("<m>") | {"lstrip": "no"}}, "lstrip"),
        ([token("<m>")], "list"),
        (None, "NoneType"),
    ],
)
def test_an_added_token_that_contradicts_is_refused(load: Load, decoder: Any, message: str):
    with pytest.raises(CheckpointError, match=message):
        load({"added_tokens_decoder": decoder})


def test_special_tokens_map_overrides_a_config_of_its_age(load: Load):
    names = {"eos_token": "<n>", "bos_token": token("<m>")}
    older = load({"bos_token": "<s>", "eos_token": "</s>"}, special_tokens_map=names)
    assert (older.bos_token, older.eos_token, shown(older)) == ("<m>", "<n>", "")
    newer = load({"eos_token": "</s>", "added_tokens_decoder": {}}, special_tokens_map=names)
    assert (newer.bos_token, newer.eos_token, shown(newer)) == ("", "</s>", "<m>")


def test_special_tokens_map_is_read_without_a_config(load: Load):
    assert load(special_tokens_map={"eos_token": "<n>"}).eos_token == "<n>"


def test_added_tokens_json_adds_and_names_make_special(load: Load):
    ids = {"<z>": 260, "<y>": 261, "<m>": 258}
    tokenizer = load({"eos_token": "<y>"}, added_tokens=ids)
    assert (tokenizer.eos_ids, shown(tokenizer)) == ({261}, "<m><z>")
    ignored = load({"eos_token": "</s>", "added_tokens_decoder": {}}, added_tokens=ids)
    assert ignored.vocab_size == 260


@pytest.mark.parametrize("ids", [{"<z>": 261}, {"<z>": 0}, {"<z>": 260, "<y>": 260}, {"<z>": -1}, {"<z>": "260"}])
def test_added_tokens_json_with_ids_that_do_not_follow(load: Load, ids: Any):
    with pytest.raises(CheckpointError, match=r"<z>|<y>"):
        load(added_tokens=ids)


@pytest.mark.parametrize("name", ["special_tokens_map", "added_tokens", "tokenizer_config"])
def test_each_file_must_hold_an_object(load: Load, name: str):
    with pytest.raises(CheckpointError, match=rf"{name}\.json holds a list"):
        load(**{name: []}) if name != "tokenizer_config" else load([])


def test_add_bos_token_counts_beside_a_tokenizer_json(load: Load):
    """As in GGUF files made of such a directory; transformers 5 lets the post-processor decide alone."""
    assert load({"bos_token": "<s>", "add_bos_token": True}).bos_id == 256
    backend = Tokenizer.from_str(json.dumps(base()))
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 256)])
    layout = json.loads(backend.to_str())
    assert load({"bos_token": "<s>"}, layout=layout).bos_id == 256
    assert load({"bos_token": "<s>", "add_bos_token": False}, layout=layout).bos_id is None


def test_ids_that_the_package_would_not_give(load: Load):
    layout = base()
    layout["added_tokens"][-1]["id"] = 300
    with pytest.raises(CheckpointError, match="'<n>' the id 300"):
        load(layout=layout)


def test_what_was_merged_is_saved(load: Load, tmp_path: Path):
    tokenizer = load({"eos_token": "<m>", "added_tokens_decoder": {"260": token("<p>", lstrip=True)}})
    folder = tmp_path / "again"
    folder.mkdir()
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)
    again = load_tokenizer(folder)
    assert again.files() == tokenizer.files()
    assert again.special_tokens == tokenizer.special_tokens
    assert again.encode("a <p> b", special=True) == tokenizer.encode("a <p> b", special=True)


# ---- SentencePiece ---------------------------------------------------------------------------------------------------


@pytest.fixture
def load_model(tmp_path: Path, mistral_folder: Path) -> Load:
    """Mistral's first model, 32,000 pieces, with files beside it."""

    def write(**files: Any) -> TextTokenizer:
        (tmp_path / "tokenizer.model").write_bytes((mistral_folder / "tokenizer.model.v1").read_bytes())
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return load_tokenizer(tmp_path)

    return write


def test_a_sentencepiece_model_takes_added_tokens(load_model: Load, tmp_path: Path):
    """As ChatML fine-tunes of Llama 2 and Mistral, and Phi-3's own layout."""
    entries = {
        "32000": token("<|im_end|>", rstrip=True),
        "32001": token("<tool>", False),
        "32002": token("zzyzx", False),
    }
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": entries}
    tokenizer = load_model(tokenizer_config=config)
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (32003, {32000})
    assert 32002 in tokenizer.encode("a zzyzx")
    ids = tokenizer.encode("Hi<|im_end|>\n<tool>", special=True)
    assert ids[-2:] == [32000, 32001]
    assert tokenizer.decode(ids) == "Hi<tool>"
    assert not set(tokenizer.encode("Hi<|im_end|><tool>")) & {32000, 32001}
    detokenizer = Detokenizer(tokenizer, [])
    assert "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish() == "Hi<tool>"
    for name, content in tokenizer.files().items():
        (tmp_path / name).write_bytes(content)
    again = load_tokenizer(tmp_path)
    assert again.files() == tokenizer.files()
    assert again.encode("Hi<|im_end|>\n<tool>", special=True) == ids


def test_a_sentencepiece_model_takes_older_files(load_model: Load):
    tokenizer = load_model(added_tokens={"<|im_end|>": 32000}, special_tokens_map={"eos_token": "<|im_end|>"})
    assert (tokenizer.eos_ids, tokenizer.decode([32000])) == ({32000}, "")


def test_a_control_piece_may_be_made_visible(load_model: Load):
    """Phi-3 says so of </s>."""
    tokenizer = load_model(tokenizer_config={"eos_token": "<unk>", "added_tokens_decoder": {"2": token("</s>", False)}})
    assert tokenizer.decode([2]) == "</s>"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"added_tokens_decoder": {"32001": token("<p>")}}, "next id is 32000"),
        ({"added_tokens_decoder": {"5": token("<p>")}}, "5 is added as"),
        ({"added_tokens_decoder": {"32000": token("<p>", single_word=True)}}, "single_word"),
        ({"eos_token": "<nowhere>"}, "<nowhere>"),
        ({"additional_special_tokens": ["<nowhere>"]}, "<nowhere>"),
    ],
)
def test_what_contradicts_a_sentencepiece_model(load_model: Load, config: Any, message: str):
    with pytest.raises(CheckpointError, match=message):
        load_model(tokenizer_config=config)


def test_a_tekken_file_alone_says_what_is_missing(tmp_path: Path):
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tekken\.json alone"):
        load_tokenizer(tmp_path)


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def test_phi3_swallows_white_space_after_a_control_token():
    tokenizer = from_gguf(makers.gguf_of_pieces("phi3"))
    assert tokenizer.encode("<|user|>\n hi", special=True) == tokenizer.encode("<|user|>hi", special=True)
    other = from_gguf(makers.gguf_of_pieces("phi3") | {"general.name": "other"})
    assert other.encode("<|user|>\n hi", special=True) != other.encode("<|user|>hi", special=True)


def test_only_padding_at_the_end_is_cut():
    fields = makers.gguf_of_byte_level("qwen2")
    cut = without_padding(fields)["tokenizer.ggml.tokens"]
    assert len(cut) == len(fields["tokenizer.ggml.tokens"]) - 5
    assert without_padding(without_padding(fields)) == without_padding(fields)
    used = [*fields["tokenizer.ggml.token_type"][:-1], 1]
    assert without_padding(fields | {"tokenizer.ggml.token_type": used})["tokenizer.ggml.token_type"] == used


@pytest.mark.parametrize("kinds", [None, [], [1, 1], "x"])
def test_a_token_without_a_type_is_refused(kinds: Any):
    fields = makers.gguf_of_byte_level("qwen2") | {"tokenizer.ggml.token_type": kinds}
    with pytest.raises(CheckpointError, match="token_type"):
        from_gguf(fields)


@pytest.mark.parametrize("pre", ["default", None, "deepseek-llm", "command-r", 7])
def test_a_pre_tokenizer_is_never_guessed(pre: Any):
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre is"):
        from_gguf(makers.gguf_of_byte_level("qwen2") | {"tokenizer.ggml.pre": pre})


def test_an_old_sentencepiece_file_has_llamas_own_ids():
    fields = makers.gguf_of_pieces("llama")
    for name in ("bos", "eos", "unknown"):
        del fields[f"tokenizer.ggml.{name}_token_id"]
    tokenizer = from_gguf(fields)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})
