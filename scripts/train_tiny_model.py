"""Train the tests' checkpoint: a SentencePiece tokenizer and a llama-shaped model that recite one shipped text.

The decoder is `jaxinfer.model.transformer`, the same that serves; only the hardware's part is another: `TrainingOps`
attends over whole sequences and keeps no cache, so gradients flow through it. Runs on CPU in about a minute and is the
same every time on one machine.

    python scripts/train_tiny_model.py            # writes tests/data/tiny/model
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import sentencepiece
import typer
from jaxtyping import Array, Float, Float32
from tqdm import tqdm

from jaxinfer.arrays import Keys, Logits, Pages, Queries, Tokens, Values
from jaxinfer.checkpoint.orbax import save_trained
from jaxinfer.config import ModelConfig
from jaxinfer.model.ops import TokenBatch
from jaxinfer.model.plain_ops import PlainWeights
from jaxinfer.model.transformer import Transformer, init_params
from jaxinfer.text.tokenizer import from_sentencepiece

DATA = Path(__file__).parents[1] / "tests" / "data" / "tiny"
LAST_STEP = 1_500
MARGIN = 5.0  # of the right token's logit over the runner-up: far above what another kernel's rounding moves


class TrainingOps(PlainWeights):
    """The model's `Ops` without a cache: each row is one page, as long as the sequence, made anew each time."""

    def write(self, pages: Pages, keys: Keys, values: Values | None, batch: TokenBatch) -> Pages:
        """This pass's keys and values as [s, 2, k, t, c]; what was in `pages` is not needed."""
        if values is None:
            raise NotImplementedError("a llama-shaped model has values beside its keys")
        return jnp.stack([keys, values], axis=1).transpose(0, 1, 3, 2, 4)

    def attend(
        self,
        queries: Queries,
        pages: Pages,
        batch: TokenBatch,
        *,
        window: int | None,
        scale: float,
        softcap: float | None,
        sinks: Float32[Array, "k g"] | None = None,
    ) -> Float[Array, "s t k g c"]:
        """Causal attention of every query over its own row."""
        if window is not None or softcap is not None or sinks is not None:
            raise NotImplementedError("a llama-shaped model has neither windows nor softcaps nor sinks")
        scores = scale * jnp.einsum("stkgc,skuc->skgtu", queries, pages[:, 0])
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        chances = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf).astype(jnp.float32))
        return jnp.einsum("skgtu,skuc->stkgc", chances.astype(queries.dtype), pages[:, 1])


def train_tokenizer(text: str, vocabulary: int = 448) -> bytes:
    """A SentencePiece model that spells what it does not know in bytes and leaves every space where it was."""
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocabulary,  # 3 control tokens, 256 bytes, and pieces of the text
        character_coverage=0.98,  # rare characters stay bytes: they must stream without breaking
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def tiny_config(vocabulary: int) -> ModelConfig:
    """A llama of two layers with grouped queries and a tied head."""
    head_dim = 24
    return ModelConfig(
        family="llama",
        vocab_size=vocabulary,
        width=96,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        mlp_width=256,
        context=2_048,
        query_scale=head_dim**-0.5,
        tied_head=True,
    )


def whole_logits(config: ModelConfig, params: Any, tokens: Tokens) -> Logits:
    """The next-token logits after each token of one sequence: [t, v]."""
    count = tokens.shape[1]
    batch = TokenBatch(
        tokens=tokens,
        positions=jnp.arange(count, dtype=jnp.int32)[None],
        page_table=jnp.zeros((1, 1), jnp.int32),
        lengths=jnp.full((1,), count, jnp.int32),
    )
    empty = jnp.zeros((1, 2, config.kv_heads, count, config.head_dim))
    model = Transformer(config, jnp.float32)
    hidden: Any = model.apply({"params": params}, batch, (empty,) * config.layers, TrainingOps())[0]
    logits: Any = model.apply({"params": params}, hidden[0], TrainingOps(), method="logits")
    return logits


@dataclass(frozen=True)
class Trainer:
    """One text, again and again: `step` improves the parameters and measures them as they were before."""

    config: ModelConfig
    optimizer: optax.GradientTransformation
    tokens: Tokens

    def loss(self, params: Any) -> tuple[Array, Array]:
        """Mean cross-entropy, and the least margin of a right token over the best wrong one."""
        logits, targets = whole_logits(self.config, params, self.tokens[:, :-1]), self.tokens[0, 1:]
        right = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        wrong = jnp.max(logits.at[jnp.arange(len(targets)), targets].set(-jnp.inf), axis=1)
        mean = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
        return mean, jnp.min(right - wrong)

    def step(self, params: Any, state: Any) -> tuple[Any, Any, Array, Array]:
        """Parameters and optimizer state after one update, loss and margin before it. DONATES the state."""
        (loss, margin), gradients = jax.value_and_grad(self.loss, has_aux=True)(params)
        updates, state = self.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, margin


def train(config: ModelConfig, tokens: Tokens, seed: int) -> Any:
    """Parameters that recite `tokens` greedily with a margin of MARGIN. Raises RuntimeError where they never do."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 4e-3, 50, LAST_STEP, 1e-4)
    trainer = Trainer(config, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01)), tokens)
    step: Callable[..., Any] = jax.jit(trainer.step, donate_argnums=1)
    params = jax.jit(partial(init_params, config, jnp.float32))(jax.random.key(seed))
    state = jax.jit(trainer.optimizer.init)(params)
    with tqdm(range(LAST_STEP), desc="training") as bar:
        for count in bar:
            measured = params
            params, state, loss, margin = step(params, state)
            bar.set_postfix(loss=f"{loss:.4f}", margin=f"{margin:.2f}")
            if margin >= MARGIN:
                tqdm.write(f"loss {loss:.4f}, least margin {margin:.2f} after {count} steps")
                return measured
    raise RuntimeError(f"no margin of {MARGIN} after {LAST_STEP} steps; raise LAST_STEP or shorten the text")


def main(
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint; must not exist.")] = DATA / "model",
    text: Annotated[Path, typer.Option(help="What to recite.")] = DATA / "text.txt",
    seed: Annotated[int, typer.Option(help="Of the first parameters.")] = 0,
    vocabulary: Annotated[int, typer.Option(help="Words of the tokenizer.")] = 448,
) -> None:
    """Train the tests' checkpoint and save it with Orbax."""
    words = text.read_text().strip()
    with TemporaryDirectory() as folder:
        tokenizer_file = Path(folder) / "tokenizer.model"
        tokenizer_file.write_bytes(train_tokenizer(words, vocabulary))
        tokenizer = from_sentencepiece(tokenizer_file)
        ids = [*tokenizer.encode(words), *tokenizer.eos_ids]
        print(f"{len(words)} characters are {len(ids)} tokens of {tokenizer.vocab_size}")
        config = tiny_config(tokenizer.vocab_size)
        save_trained("tiny", config, train(config, jnp.asarray([ids], jnp.int32), seed), tokenizer_file, out)
    (out / "params" / "commit_success.txt").unlink(missing_ok=True)  # holds a path of this machine; nothing reads it
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    typer.run(main)
