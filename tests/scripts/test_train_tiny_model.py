"""The training script makes what the tests stand on: its tokenizer, its arithmetic, and that it really recites."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint.load import load
from jaxinfer.engine.ops import PagedOps
from jaxinfer.model.ops import TokenBatch
from jaxinfer.model.transformer import Transformer, init_params


@pytest.fixture(scope="module")
def train(script):
    return script("train_tiny_model")


@pytest.fixture(scope="module")
def text(tiny_path: Path) -> str:
    return (tiny_path.parent / "text.txt").read_text().strip()


def test_the_tokenizer_is_the_same_every_time(train, text: str, tiny_path: Path):
    assert train.train_tokenizer(text) == (tiny_path / "tokenizer.model").read_bytes()


def test_the_committed_weights_recite_the_text_with_a_margin(train, text: str, tiny_path: Path):
    tiny = load(str(tiny_path), dtype="float32")
    ids = [*tiny.tokenizer.encode(text), *tiny.eos_ids]
    trainer = train.Trainer(tiny.config, None, jnp.asarray([ids], jnp.int32))
    loss, margin = jax.jit(trainer.loss)(tiny.params)
    assert margin >= train.MARGIN
    assert loss < 0.1


def test_the_checkpoint_is_small_and_holds_no_path(tiny_path: Path):
    files = [path for path in tiny_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_000_000
    assert not [path for path in files if b"/home/" in path.read_bytes() or b".partial/" in path.read_bytes()]


def test_training_attends_as_serving_does(train):
    """One prefill over a fresh pool of shuffled pages gives the logits that training saw."""
    config = train.tiny_config(64)
    params = jax.jit(partial(init_params, config, jnp.float32))(jax.random.key(3))
    tokens = jax.random.randint(jax.random.key(4), (1, 40), 0, 64, jnp.int32)
    table = jnp.asarray([[4, 1, 3]], jnp.int32)
    batch = TokenBatch(tokens, jnp.arange(40, dtype=jnp.int32)[None], table, jnp.asarray([40], jnp.int32))
    pool = tuple(jnp.full((5, 2, config.kv_heads, 16, config.head_dim), jnp.nan) for _ in range(config.layers))

    @jax.jit
    def both(params, batch, pool):
        model = Transformer(config, jnp.float32)
        hidden, _ = model.apply({"params": params}, batch, pool, PagedOps())
        served = model.apply({"params": params}, hidden[0], PagedOps(), method="logits")
        return served, train.whole_logits(config, params, batch.tokens)

    served, trained = both(params, batch, pool)
    np.testing.assert_allclose(served, trained, atol=2e-5, rtol=1e-4)


def test_it_learns_a_new_line(train, tmp_path: Path):
    """The whole script on a text it has not seen: what it saves recites that text."""
    line = "a ferry left whenever somebody rang the bell 🔔"
    (tmp_path / "line.txt").write_text(line)
    train.main(out=tmp_path / "model", text=tmp_path / "line.txt", seed=1, vocabulary=300)
    model = load(str(tmp_path / "model"), dtype="float32")
    ids = jnp.asarray([[*model.tokenizer.encode(line), *model.eos_ids]], jnp.int32)
    best = jax.jit(partial(train.whole_logits, model.config))(model.params, ids).argmax(-1)
    assert best[:-1].tolist() == ids[0, 1:].tolist()


def test_a_text_that_is_never_learned_is_an_error(train, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train, "LAST_STEP", 60)
    monkeypatch.setattr(train, "MARGIN", 1e9)
    with pytest.raises(RuntimeError, match="no margin"):
        train.train(train.tiny_config(16), jnp.arange(8, dtype=jnp.int32)[None], seed=0)
