"""Tiny random models of every family, in both formats, against transformers' logits (scripts/make_goldens.py).

Every directory `tests/golden/tiny_*` is a case. Beside the Hugging Face directory lies `model.gguf` by llama.cpp's own
converter, where it writes the family; where that file cannot say all of the configuration, `gguf_logits.npz` holds the
logits of what it does say.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.load import load
from jaxinfer.config import MeshConfig, ModelConfig
from jaxinfer.engine.cache import make_pages
from jaxinfer.engine.ops import PagedOps
from jaxinfer.engine.sharding import make_mesh, param_shardings
from jaxinfer.model.families import FAMILIES
from jaxinfer.model.ops import TokenBatch
from jaxinfer.model.transformer import Transformer

from .goldens import GOLDEN, NAMES, WITH_GGUF, family, proving

TOKENS, PAGE = 72, 32
ONE = make_mesh(MeshConfig())


@cache
def checkpoint_of(path: Path) -> Checkpoint:
    return load(str(path), dtype="float32")


@cache
def step_of(config: ModelConfig) -> Any:
    """One jitted step; a GGUF file that means the same model shares its executables.

    LLVM's optimisations are off: they take two thirds of the compilation, and nothing runs long here.
    """
    model, ops = Transformer(config, jnp.float32), PagedOps()

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def step(params: Any, batch: TokenBatch, pages: Any) -> Any:
        hidden, pages = model.apply({"params": params}, batch, pages, ops)
        return model.apply({"params": params}, hidden[0], ops, method="logits"), pages

    return step


def logits_of(config: ModelConfig, params: Any, ids: np.ndarray, chunks: list[int], mesh: Mesh = ONE) -> np.ndarray:
    """Logits of every token of `ids`, which runs through the decoder in `chunks` of its length."""
    table = jnp.arange(-(-len(ids) // PAGE), dtype=jnp.int32)[None]
    pages = make_pages(config, table.size, PAGE, "float32", mesh)
    start, found = 0, []
    for size in chunks:
        positions = jnp.arange(start, start + size, dtype=jnp.int32)[None]
        batch = TokenBatch(jnp.asarray(ids[None, start : start + size]), positions, table, jnp.array([start + size]))
        logits, pages = step_of(config)(params, batch, pages)
        found.append(np.asarray(logits))
        start += size
    return np.concatenate(found)


def check_logits(path: Path, golden: Mapping[str, np.ndarray], chunks: list[int]) -> None:
    checkpoint = checkpoint_of(path)
    found = logits_of(checkpoint.config, checkpoint.params, golden["ids"], chunks)
    np.testing.assert_allclose(found, golden["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", proving("logits"))
def test_logits_equal_those_of_transformers(name: str):
    check_logits(GOLDEN / name, np.load(GOLDEN / name / "logits.npz"), [TOKENS])


@pytest.mark.parametrize("name", proving("decode"))
@pytest.mark.parametrize("chunks", [[12] * 6, [1] * TOKENS], ids=["chunked", "token by token"])
def test_so_they_do_however_the_tokens_are_cut(name: str, chunks: list[int]):
    check_logits(GOLDEN / name, np.load(GOLDEN / name / "logits.npz"), chunks)


@pytest.mark.parametrize("name", proving("GGUF", WITH_GGUF))
def test_the_gguf_file_gives_the_logits_of_what_it_says(name: str):
    other = GOLDEN / name / "gguf_logits.npz"
    golden = np.load(other if other.exists() else GOLDEN / name / "logits.npz")
    check_logits(GOLDEN / name / "model.gguf", golden, [TOKENS])


@pytest.mark.parametrize("name", [name for name in NAMES if "short_logits" in np.load(GOLDEN / name / "logits.npz")])
def test_a_rope_that_depends_on_the_context_has_its_short_factors_in_a_short_one(name: str):
    golden, checkpoint = np.load(GOLDEN / name / "logits.npz"), checkpoint_of(GOLDEN / name)
    expected = golden["short_logits"]
    short = replace(checkpoint.config, context=checkpoint.config.rope.original_context)
    found = logits_of(short, checkpoint.params, golden["ids"][: len(expected)], [len(expected)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["tiny_qwen3_moe", "tiny_gpt_oss", "tiny_deepseek_v3"])
def test_two_devices_give_the_same_logits(name: str):
    """Experts, sinks and a latent divided over devices; `tests/conftest.py` forces four."""
    mesh = make_mesh(MeshConfig(tensor=2))
    checkpoint = load(str(GOLDEN / name), dtype="float32", shardings=lambda config: param_shardings(config, mesh))
    golden = np.load(GOLDEN / name / "logits.npz")
    found = logits_of(checkpoint.config, checkpoint.params, golden["ids"], [TOKENS], mesh)
    np.testing.assert_allclose(found, golden["logits"], rtol=0, atol=1e-4)


def test_every_family_has_a_golden():
    assert {family(name) for name in NAMES} == {row.name for row in FAMILIES}


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_could_fail(name: str):
    """Logits of another size or of no spread would let a wrong decoder pass."""
    logits = np.load(GOLDEN / name / "logits.npz")["logits"]
    assert logits.shape == (TOKENS, 264)
    assert logits.std() > 1
