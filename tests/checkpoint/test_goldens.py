"""Hugging Face directories through our loader and decoder, against transformers' logits (scripts/make_goldens.py)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint.load import load
from jaxinfer.engine.ops import PagedOps
from jaxinfer.model.ops import TokenBatch
from jaxinfer.model.transformer import Transformer

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = ("tiny_llama", "tiny_mistral", "tiny_gemma3")
PAGE = 8


def logits_of(path: Path, ids: np.ndarray, chunks: list[int]) -> np.ndarray:
    """Logits of every token of `ids`, which runs through the decoder in `chunks` of its length."""
    checkpoint = load(str(path), dtype="float32")
    config, model, ops = checkpoint.config, Transformer(checkpoint.config, jnp.float32), PagedOps()
    table = jnp.arange(-(-len(ids) // PAGE), dtype=jnp.int32)[None]
    pages = tuple(jnp.zeros((table.size, 2, config.kv_heads, PAGE, config.head_dim)) for _ in range(config.layers))
    start, found = 0, []

    @jax.jit
    def step(params, batch: TokenBatch, pages):
        hidden, pages = model.apply({"params": params}, batch, pages, ops)
        return model.apply({"params": params}, hidden[0], ops, method="logits"), pages

    for size in chunks:
        positions = jnp.arange(start, start + size, dtype=jnp.int32)[None]
        batch = TokenBatch(jnp.asarray(ids[None, start : start + size]), positions, table, jnp.array([start + size]))
        logits, pages = step(checkpoint.params, batch, pages)
        found.append(np.asarray(logits))
        start += size
    return np.concatenate(found)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("chunks", [[72], [12] * 6], ids=["whole", "chunked"])
def test_logits_equal_those_of_transformers(name: str, chunks: list[int]):
    golden = np.load(GOLDEN / name / "logits.npz")
    found = logits_of(GOLDEN / name, golden["ids"], chunks)
    np.testing.assert_allclose(found, golden["logits"], rtol=0, atol=1e-4)


def test_the_goldens_could_fail():
    """Logits of another size or of no spread would let a wrong decoder pass."""
    for name in TINY:
        logits = np.load(GOLDEN / name / "logits.npz")["logits"]
        assert logits.shape == (72, 264)
        assert logits.std() > 1
