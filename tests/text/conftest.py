"""Real tokenizers of every kind, and one whose ids are bytes."""

import importlib.util
from pathlib import Path

import pytest

from jaxinfer.checkpoint.gguf_header import read_header
from jaxinfer.text.json_codec import byte_alphabet
from jaxinfer.text.tokenizer import TextTokenizer, from_gguf, from_sentencepiece


@pytest.fixture(scope="session")
def mistral_folder() -> Path:
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or not spec.submodule_search_locations:
        pytest.fail("this test reads the package mistral_common: pip install --no-deps mistral-common==1.13.1")
    return Path(spec.submodule_search_locations[0]) / "data"


@pytest.fixture(scope="session")
def smollm_fields(demo_path: Path) -> dict:
    return dict(read_header(demo_path).fields)


@pytest.fixture(scope="session")
def smollm(smollm_fields: dict) -> TextTokenizer:
    return from_gguf(smollm_fields)


@pytest.fixture(scope="session")
def gemma(gemma_path: Path) -> TextTokenizer:
    return from_gguf(read_header(gemma_path).fields)


@pytest.fixture(scope="session")
def mistral_v1(mistral_folder: Path) -> TextTokenizer:
    return from_sentencepiece(mistral_folder / "tokenizer.model.v1")


@pytest.fixture(scope="session")
def mistral_v3(mistral_folder: Path) -> TextTokenizer:
    return from_sentencepiece((mistral_folder / "mistral_instruct_tokenizer_240323.model.v3").read_bytes())


@pytest.fixture(scope="session", params=["smollm", "gemma", "mistral_v1", "mistral_v3"])
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    """Each real tokenizer in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def byte_fields() -> dict:
    """GGUF metadata of a byte-level tokenizer without merges: id = byte, then <s>, </s> and <tool>."""
    letters = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt2",
        "tokenizer.ggml.tokens": [*letters, "<s>", "</s>", "<tool>"],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 4],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.add_bos_token": True,
    }


@pytest.fixture(scope="session")
def by_bytes(byte_fields: dict) -> TextTokenizer:
    return from_gguf(byte_fields)
