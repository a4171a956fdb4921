"""The decoder against a second one in float64 numpy, switch by switch; whole = chunked = token by token."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from flax.errors import ScopeParamShapeError
from jaxtyping import jaxtyped

from jaxinfer.config import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig
from jaxinfer.engine.ops import PagedOps
from jaxinfer.model import transformer
from jaxinfer.model.ops import TokenBatch
from jaxinfer.model.rope import rope_phases
from jaxinfer.model.transformer import Transformer, abstract_params, init_params, logical_axes
from pallas_kernels.dispatch import OPERATIONS

from . import numpy_decoder

PLAIN = ModelConfig(
    family="llama",
    vocab_size=61,
    width=24,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=8,
    mlp_width=40,
    context=64,
    query_scale=8**-0.5,
)
LLAMA3 = RopeConfig(
    theta=100.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16
)
GEMMA3 = replace(
    PLAIN,
    family="gemma3",
    layers=3,
    windows=(4, 4, None),
    local_rope=RopeConfig(theta=50.0),
    rope=RopeConfig(theta=1000.0, kind="linear", factor=8.0),
    activation="gelu_tanh",
    qk_norm="head",
    post_norms=True,
    tied_head=True,
    embedding_scale=24**0.5,
    query_scale=0.3,
)
DEEPSEEK_EXPERTS = ExpertsConfig(
    8, 3, 10, scoring="sigmoid", scale=2.5, groups=4, active_groups=2, selection_bias=True, shared_width=14
)
LATENT = replace(PLAIN, kv_heads=6, head_dim=12, latent=LatentConfig(12, 4, 8, 6, query_rank=10, norm_eps=0.3))
CONFIGS = {
    "plain": PLAIN,
    "tied head": replace(PLAIN, tied_head=True),
    "one head": replace(PLAIN, heads=1, kv_heads=1),
    "head_dim is not width / heads": replace(PLAIN, head_dim=10),
    "linear rope": replace(PLAIN, rope=RopeConfig(theta=100.0, kind="linear", factor=4.0)),
    "llama3 rope": replace(PLAIN, rope=LLAMA3),
    "windows": replace(PLAIN, windows=(3, None)),
    "a window of one": replace(PLAIN, windows=(1, 5)),
    "two ropes": replace(PLAIN, windows=(3, None), local_rope=RopeConfig(theta=10.0)),
    "gelu": replace(PLAIN, activation="gelu_tanh"),
    "query and key norms": replace(PLAIN, qk_norm="head"),
    "post norms": replace(PLAIN, post_norms=True),
    "attention bias": replace(PLAIN, attention_bias=True),
    "output bias": replace(PLAIN, output_bias=True),
    "embedding scale": replace(PLAIN, embedding_scale=5.0),
    "attention softcap": replace(PLAIN, attention_softcap=0.5),
    "logit softcap": replace(PLAIN, logit_softcap=1.0),
    "norm epsilon": replace(PLAIN, norm_eps=0.5),
    "query scale": replace(PLAIN, query_scale=2.0),
    "gemma3": GEMMA3,
    "a layer without rope": replace(PLAIN, no_rope=(1,)),
    "exact gelu": replace(PLAIN, activation="gelu"),
    "clamped swiglu": replace(PLAIN, activation="swiglu_clamped"),
    "norms of all heads together": replace(PLAIN, qk_norm="all"),
    "post norms alone": replace(PLAIN, pre_norms=False, post_norms=True),
    "biases of the MLP": replace(PLAIN, mlp_bias=True),
    "residual and logit scale": replace(PLAIN, residual_scale=0.3, logit_scale=0.2),
    "sinks": replace(PLAIN, sinks=True, windows=(3, None)),
    "experts": replace(PLAIN, experts=ExpertsConfig(6, 2, 10)),
    "experts as gpt-oss has them": replace(
        PLAIN, activation="swiglu_clamped", mlp_bias=True, experts=ExpertsConfig(5, 2, 10, router_bias=True)
    ),
    "experts in groups": replace(PLAIN, experts=DEEPSEEK_EXPERTS, dense_layers=(0,)),
    "latent attention": LATENT,
    "latent attention, queries straight": replace(LATENT, latent=LatentConfig(12, 4, 8, 6)),
}
TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, 61, 21)]
PAGE, TABLE = 8, [5, 1, 6, 3]
OPS = PagedOps()


def random_params(config: ModelConfig) -> Any:
    """Every leaf random, norms and biases too: ones and zeros would hide that they are not used."""
    shapes, tree = jax.tree.flatten(abstract_params(config, jnp.float32))
    random = np.random.default_rng(0)
    leaves = [random.standard_normal(leaf.shape) * 0.3 + (leaf.ndim == 1) for leaf in shapes]
    return tree.unflatten([leaf.astype(np.float32) for leaf in leaves])


@cache
def make_step(config: ModelConfig, ops: PagedOps) -> Any:
    """Jitted once for each pair, however many tests and chunk sizes use it."""
    model = Transformer(config, jnp.float32)

    @jax.jit
    def step(params: Any, batch: TokenBatch, pages: Any) -> tuple[Any, jax.Array]:
        hidden, pages = model.apply({"params": params}, batch, pages, ops)
        return pages, model.apply({"params": params}, hidden[0], ops, method="logits")

    return step


def run(
    config: ModelConfig,
    params: Any,
    cuts: list[int],
    *,
    tokens: list[int] = TOKENS,
    pad: int = 0,
    ops: PagedOps = OPS,
) -> np.ndarray:
    """Logits of every token, run in chunks that end at `cuts`, over a pool that is NaN where nothing was written."""
    planes, heads, features = config.cache_shape
    pages = (jnp.full((8, planes, heads, PAGE, features), jnp.nan),) * config.layers
    rows = []
    for start, end in zip([0, *cuts], cuts, strict=False):
        chunk = np.zeros((1, end - start + pad), np.int32)
        positions = np.full_like(chunk, -1)
        chunk[0, : end - start], positions[0, : end - start] = tokens[start:end], np.arange(start, end)
        table, lengths = np.array([TABLE], np.int32), np.array([end], np.int32)
        batch = TokenBatch(*map(jnp.asarray, (chunk, positions, table, lengths)))
        pages, logits = make_step(config, ops)(params, batch, pages)
        rows.append(logits[: end - start])
    return np.concatenate(rows)


WAYS = {"whole": [21], "chunks": [7, 14, 21], "token by token": list(range(1, 22))}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_switch_means_what_the_second_decoder_says(name: str) -> None:
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    expected = numpy_decoder.decode(TOKENS, params, config)
    np.testing.assert_allclose(run(config, params, [21], pad=3), expected, rtol=2e-4, atol=2e-4)
    if config != PLAIN and jax.tree.structure(params) == jax.tree.structure(random_params(PLAIN)):
        same_weights = config.head_dim == PLAIN.head_dim and config.heads == PLAIN.heads
        assert not same_weights or np.abs(expected - numpy_decoder.decode(TOKENS, params, PLAIN)).max() > 0.01


@pytest.mark.parametrize("way", ["chunks", "token by token"])
@pytest.mark.parametrize(
    "name", ["plain", "llama3 rope", "a window of one", "gemma3", "sinks", "experts in groups", "latent attention"]
)
def test_chunks_and_single_tokens_give_the_logits_of_the_whole(name: str, way: str) -> None:
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    expected = numpy_decoder.decode(TOKENS, params, config)
    np.testing.assert_allclose(run(config, params, WAYS[way]), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [1, 8, 9])
def test_a_window_counts_exactly_its_keys(window: int, way: str) -> None:
    """With one layer, the logits at i depend on token i - window + 1 and not on token i - window."""
    config = replace(PLAIN, layers=1, windows=(window,))
    params = random_params(config)
    other = [*TOKENS[:5], (TOKENS[5] + 1) % 61, *TOKENS[6:]]
    before, after = run(config, params, WAYS[way]), run(config, params, WAYS[way], tokens=other)
    changed = np.flatnonzero(np.abs(after - before).max(axis=1) > 1e-4)
    assert changed.tolist() == list(range(5, 5 + window))


def test_reference_kernels_give_the_same_logits() -> None:
    params = random_params(GEMMA3)
    plain = run(GEMMA3, params, [13, 21], ops=PagedOps(dict.fromkeys(OPERATIONS, "reference")))
    np.testing.assert_allclose(run(GEMMA3, params, [13, 21]), plain, rtol=1e-4, atol=1e-4)


def test_rows_do_not_see_each_other() -> None:
    """Two rows of different lengths in one batch: each has its own logits, and the padding row spoils neither."""
    params, model = random_params(GEMMA3), Transformer(GEMMA3, jnp.float32)
    pages = (jnp.full((8, 2, 2, PAGE, 8), jnp.nan),) * 3
    tokens = np.zeros((3, 21), np.int32)
    positions = np.full_like(tokens, -1)
    for row, length in enumerate([21, 9]):
        tokens[row, :length], positions[row, :length] = TOKENS[:length], np.arange(length)
    tables = np.array([[5, 1, 6], [3, 0, 99], [5, 5, 5]], np.int32)
    batch = TokenBatch(*map(jnp.asarray, (tokens, positions, tables, np.array([21, 9, 0], np.int32))))
    hidden, _ = jax.jit(lambda *args: model.apply({"params": args[0]}, *args[1:], OPS))(params, batch, pages)
    assert np.isfinite(hidden).all()
    logits = model.apply({"params": params}, hidden[jnp.array([0, 1]), jnp.array([20, 8])], OPS, method="logits")
    expected = [numpy_decoder.decode(TOKENS[:length], params, GEMMA3)[-1] for length in (21, 9)]
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["plain", "windows", "gemma3", "experts", "latent attention"])
def test_asked_for_the_last_tokens_only_it_gives_the_same_states_and_the_same_pages(name: str) -> None:
    """Two rows of different lengths: the last block works on one token each, and still stores every key and value."""
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    model, lengths = Transformer(config, jnp.float32), np.array([21, 9], np.int32)
    planes, heads, features = config.cache_shape
    pages = (jnp.zeros((8, planes, heads, PAGE, features)),) * config.layers
    positions = np.arange(21, dtype=np.int32) * np.ones((2, 1), np.int32)
    positions[1, 9:] = -1
    tables = np.array([[5, 1, 6], [3, 0, 99]], np.int32)
    batch = TokenBatch(*map(jnp.asarray, (np.array([TOKENS] * 2, np.int32), positions, tables, lengths)))
    apply = jax.jit(lambda *args: model.apply({"params": params}, batch, pages, OPS, *args))
    whole, stored = apply()
    last, same = apply(jnp.asarray(lengths - 1))
    assert last.shape == (2, 1, config.width)
    np.testing.assert_allclose(last[:, 0], whole[np.arange(2), lengths - 1], rtol=1e-5, atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), same, stored)


def test_bfloat16_weights_keep_norms_and_logits_in_float32() -> None:
    config = replace(GEMMA3, layers=1, windows=(4,))
    params = jax.jit(lambda key: init_params(config, jnp.bfloat16, key))(jax.random.key(0))
    kinds = {name: leaf.dtype for name, leaf in params.items() if not name.startswith("block")}
    assert kinds == {"embedding": jnp.bfloat16, "final_norm": jnp.float32}
    model, pages = Transformer(config, jnp.bfloat16), (jnp.zeros((4, 2, 2, PAGE, 8), jnp.bfloat16),)
    tokens = jnp.asarray([TOKENS[:8]], jnp.int32)
    batch = TokenBatch(tokens, jnp.arange(8)[None], jnp.zeros((1, 1), jnp.int32), jnp.array([8]))
    hidden, pages = jax.jit(lambda *args: model.apply({"params": args[0]}, *args[1:], OPS))(params, batch, pages)
    assert hidden.dtype == pages[0].dtype == jnp.bfloat16
    assert model.apply({"params": params}, hidden[0], OPS, method="logits").dtype == jnp.float32


def test_the_embedding_scale_is_rounded_to_the_weights_dtype() -> None:
    """Gemma multiplies by sqrt(width) as bfloat16 holds it: 25.25 for width 640, where float32 has 25.298."""
    config = replace(PLAIN, embedding_scale=640**0.5)
    for dtype, scale in ((jnp.bfloat16, 25.25), (jnp.float32, np.float32(640**0.5))):
        params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), abstract_params(config, dtype))
        embed = Transformer(config, dtype).apply({"params": params}, jnp.zeros((1, 1), jnp.int32), OPS, method="_embed")
        np.testing.assert_array_equal(np.asarray(embed, np.float32), np.float32(scale))


def test_the_residual_scale_is_not_rounded_to_the_weights_dtype() -> None:
    """Granite's is a plain number: torch multiplies a bfloat16 by it in float32. As a bfloat16 0.22 is 0.2197."""
    block = transformer.DecoderBlock(replace(PLAIN, residual_scale=0.22), jnp.bfloat16, 0)
    added = jnp.asarray(np.random.default_rng(0).normal(size=(1, 64, 8)), jnp.bfloat16)
    scaled = (added.astype(jnp.float32) * np.float32(0.22)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(block._add(jnp.zeros_like(added), added), scaled)


def test_ropes_are_traced_in_layer_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that hangs on Python's hash of a string would miss the compile cache in every other process."""
    traced: list[RopeConfig] = []
    monkeypatch.setattr(transformer, "rope_phases", lambda rope, *rest: traced.append(rope) or rope_phases(rope, *rest))
    batch = TokenBatch(*(jnp.zeros(shape, jnp.int32) for shape in ((1, 1), (1, 1), (1, 1), (1,))))
    pages = (jnp.zeros((1, 2, 2, 8, 8)),) * 2
    for theta in range(10, 20):  # each order is right by chance half of the time
        config = replace(PLAIN, windows=(3, None), local_rope=RopeConfig(theta=float(theta)))
        params, model = abstract_params(config, jnp.float32), Transformer(config, jnp.float32)
        traced.clear()
        jax.eval_shape(lambda params, model=model: model.apply({"params": params}, batch, pages, OPS), params)
        assert traced == [config.local_rope, config.rope]


def test_abstract_params_and_axes_describe_what_init_makes() -> None:
    for config in (replace(GEMMA3, layers=1, windows=(4,)), replace(PLAIN, layers=1, attention_bias=True)):
        made = jax.jit(lambda key, config=config: init_params(config, jnp.float32, key))(jax.random.key(0))
        shapes, axes = abstract_params(config, jnp.float32), logical_axes(config)
        kinds = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (made, shapes)]
        assert kinds[0] == kinds[1]
        ranks = jax.tree.map(len, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
        assert ranks == jax.tree.map(lambda leaf: leaf.ndim, shapes)
    assert axes["head"] == ("vocab", "width")
    assert axes["block_0"]["attention"]["qkv"] == ("kv_heads", "group", "head", "width")
    assert axes["block_0"]["mlp"]["gate_up"] == ("gate_up", "mlp", "width")


def test_a_misshapen_parameter_is_named() -> None:
    params = random_params(PLAIN)
    params["block_1"]["mlp"]["down"] = params["block_1"]["mlp"]["down"].T
    with pytest.raises(ScopeParamShapeError, match=r"down"):
        run(PLAIN, params, [1])


def test_call_and_logits_take_the_shapes_they_declare() -> None:
    apply = jaxtyped(typechecker=beartype)(Transformer.logits)
    params, model = random_params(PLAIN), Transformer(PLAIN, jnp.float32)
    assert model.apply({"params": params}, jnp.ones((3, 24)), OPS, method=apply).shape == (3, 61)
    with pytest.raises(Exception, match="hidden"):
        model.apply({"params": params}, jnp.ones((1, 3, 24)), OPS, method=apply)


@pytest.mark.parametrize("rows", [1, 4])
def test_weights_are_neither_copied_nor_transposed_on_cpu(rows: int) -> None:
    """A decode step's temporaries are far smaller than any big weight, and the pool is updated in place."""
    config = replace(PLAIN, vocab_size=4096, width=256, mlp_width=1024, head_dim=32, heads=8, tied_head=True)
    model, params = Transformer(config, jnp.float32), abstract_params(config, jnp.float32)
    pages = (jax.ShapeDtypeStruct((64, 2, 2, PAGE, 32), jnp.float32),) * 2

    def step(params: Any, pages: Any, batch: TokenBatch) -> tuple[Any, jax.Array]:
        hidden, pages = model.apply({"params": params}, batch, pages, OPS)
        return pages, model.apply({"params": params}, hidden[:, 0], OPS, method="logits")

    one, table = jax.ShapeDtypeStruct((rows, 1), jnp.int32), jax.ShapeDtypeStruct((rows, 4), jnp.int32)
    batch = TokenBatch(one, one, table, jax.ShapeDtypeStruct((rows,), jnp.int32))
    analysis = jax.jit(step, donate_argnums=1).lower(params, pages, batch).compile().memory_analysis()
    assert analysis.alias_size_in_bytes == 2 * 64 * 2 * 2 * PAGE * 32 * 4
    assert analysis.temp_size_in_bytes < 1024 * 256 * 4 / 2
