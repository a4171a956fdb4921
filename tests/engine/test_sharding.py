"""Two devices give the tokens of one; what cannot be split is refused. (`tests/conftest.py` forces four devices.)"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxinfer.checkpoint.fill import flatten, unflatten
from jaxinfer.checkpoint.quantise import quantise
from jaxinfer.config import ExpertsConfig, LatentConfig, MeshConfig
from jaxinfer.engine.ops import PagedOps
from jaxinfer.engine.sharding import make_mesh, pages_sharding, param_shardings
from jaxinfer.errors import ConfigError
from jaxinfer.model.ops import TokenBatch
from jaxinfer.model.quantised import quantisable, spread_all
from jaxinfer.model.transformer import Transformer, abstract_params, init_params
from jaxinfer.plan import StepPlan
from jaxinfer.request import SamplingParams
from pallas_kernels.pages import quantise as as_int8_pages

from .driver import ENGINE, GREEDY, MODEL, Seq, generate, ids, make_runner, prompt, run

pytestmark = pytest.mark.usefixtures("narrow_matrices_in_int4")

TWO = MeshConfig(tensor=2)


@pytest.fixture(scope="module")
def sharded():
    return make_runner(replace(ENGINE, mesh=TWO))


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=0.9, top_p=0.9, top_k=40, presence_penalty=0.5, logprobs=20)]
)
def test_two_devices_equal_one(runner, sharded, params):
    one = generate(runner, [Seq(prompt(20, i), i, params) for i in range(3)], 8)
    two = generate(sharded, [Seq(prompt(20, i), i, params) for i in range(3)], 8)
    for expected, got in zip(one, two, strict=True):
        assert ids(got) == ids(expected)
        np.testing.assert_allclose([t.logprob for t in got], [t.logprob for t in expected], atol=1e-4)


def test_the_state_keeps_its_sharding_and_is_donated(sharded):
    """An output that came back in another sharding could not take its input's memory."""
    sequence = Seq(prompt(9), 0, SamplingParams(presence_penalty=1.0))
    before = sharded._state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, before)
    run(sharded, StepPlan(seats=(sequence.seat(),), prefills=(sequence.chunk(),)))
    run(sharded, StepPlan(decodes=(sequence.decode(),)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    after = jax.tree.map(
        lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim), sharded._state, shardings
    )
    assert all(jax.tree.leaves(after))


def test_pages_and_weights_lie_half_on_each_device(sharded):
    for leaf in (sharded._state.pages[0], sharded._params["block_0"]["attention"]["qkv"]):
        assert len(leaf.addressable_shards) == 2
        assert all(shard.data.size * 2 == leaf.size for shard in leaf.addressable_shards)


def test_axes_are_auto():
    """jax.make_mesh's default is Explicit, and there the scatter into the pool fails."""
    assert make_mesh(TWO).axis_types == (AxisType.Auto,)


def test_param_shardings_follow_the_logical_axes():
    specs = jax.tree.map(lambda sharding: sharding.spec, param_shardings(MODEL, make_mesh(TWO)))
    assert jax.tree.structure(specs) == jax.tree.structure(abstract_params(MODEL, jnp.float32))
    assert specs["embedding"] == PartitionSpec("tensor", None)
    assert specs["block_1"]["mlp"]["gate_up"] == PartitionSpec(None, "tensor", None)
    assert specs["block_1"]["mlp"]["down"] == PartitionSpec(None, "tensor")
    assert specs["block_0"]["attention"]["qkv"] == PartitionSpec("tensor", None, None, None)
    assert specs["final_norm"] == PartitionSpec(None)
    assert pages_sharding(MODEL, make_mesh(TWO)).spec == PartitionSpec(None, None, "tensor")


def test_a_vocabulary_that_does_not_divide_is_replicated():
    specs = param_shardings(replace(MODEL, vocab_size=301), make_mesh(TWO))
    assert specs["embedding"].spec == PartitionSpec(None, None)


def test_more_parts_than_kv_heads_are_refused():
    with pytest.raises(ConfigError, match=r"mesh.tensor 4 does not divide the model's kv_heads 2"):
        param_shardings(MODEL, make_mesh(MeshConfig(tensor=4)))
    with pytest.raises(ConfigError, match=r"mesh.tensor 2 does not divide the model's mlp_width 63"):
        param_shardings(replace(MODEL, mlp_width=63), make_mesh(TWO))


def test_more_parts_than_devices_are_refused():
    with pytest.raises(ConfigError, match=r"mesh.tensor is 64, but JAX sees \d+ cpu device"):
        make_mesh(MeshConfig(tensor=64))


EXPERTS = replace(MODEL, experts=ExpertsConfig(4, 2, 12, shared_width=6), dense_layers=(0,))
LATENT = replace(MODEL, kv_heads=4, latent=LatentConfig(rank=10, rope_dim=4, content_dim=4, value_dim=6))


def test_what_must_be_divided_follows_the_layers():
    """The MLP's width counts where a layer has one, the experts' where one has them; with a latent all heads do."""
    two, four = make_mesh(TWO), make_mesh(MeshConfig(tensor=4))
    assert param_shardings(LATENT, four)["block_0"]["attention"]["key_up"].spec == PartitionSpec("tensor", None, None)
    specs = param_shardings(EXPERTS, two)["block_1"]["experts"]
    assert specs["gate_up"].spec == PartitionSpec(None, None, "tensor", None)
    assert specs["shared"]["down"].spec == PartitionSpec(None, "tensor")
    assert specs["router"].spec == PartitionSpec(None, None)
    param_shardings(replace(EXPERTS, mlp_width=63, dense_layers=()), two)
    for wrong, name in (
        (replace(EXPERTS, mlp_width=63), "mlp_width 63"),
        (replace(EXPERTS, experts=ExpertsConfig(4, 2, 13)), r"experts.width 13"),
        (replace(EXPERTS, experts=ExpertsConfig(4, 2, 12, shared_width=5)), r"experts.shared_width 5"),
        (replace(LATENT, heads=3, kv_heads=3), "heads 3"),
    ):
        with pytest.raises(ConfigError, match=name):
            param_shardings(wrong, two)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights_over_four_devices_give_the_logits_of_one(kind):
    """Scales of one entry stay whole where the values beside them are split."""
    config = replace(MODEL, kv_heads=4)
    four = make_mesh(MeshConfig(tensor=4))
    plain = flatten(init_params(config, jnp.float32, jax.random.key(1)))
    params = unflatten(
        {path: quantise(path, np.asarray(leaf), kind) if quantisable(path) else leaf for path, leaf in plain.items()}
    )
    split = jax.device_put(params, spread_all(params, param_shardings(config, four)))
    down = split["block_0"]["mlp"]["down"]
    assert down.values.addressable_shards[0].data.size * 4 == down.values.size
    model, ops = Transformer(config, jnp.float32), PagedOps()
    batch = TokenBatch(jnp.array([[3, 1, 4, 1]]), jnp.arange(4)[None], jnp.zeros((1, 1), int), jnp.array([4]))
    pages = (jnp.zeros((1, 2, 4, 8, config.head_dim)),) * config.layers

    @jax.jit
    def logits(params):
        hidden, _ = model.apply({"params": params}, batch, pages, ops)
        return model.apply({"params": params}, hidden[0], ops, method="logits")

    np.testing.assert_allclose(logits(split), logits(jax.device_put(params)), atol=1e-4)


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_kernels_run_on_each_devices_own_heads(planes, kind, tokens):
    """Written and attended to over four devices as on one: heads apart, or where one key serves all, queries apart."""
    random = np.random.default_rng(3)
    k, g, c = (1, 8, 16) if planes == 1 else (4, 2, 16)
    made = {name: random.standard_normal(shape).astype(np.float32) for name, shape in (
        ("queries", (2, tokens, k, g, c)), ("keys", (2, tokens, k, c)), ("values", (2, tokens, k, c)), ("sinks", (k, g))
    )}  # fmt: skip
    positions = np.array([np.arange(9, 9 + tokens), np.arange(tokens)])
    batch = TokenBatch(positions, positions, np.array([[4, 1], [3, 0]]), positions[:, -1] + 1)
    old = random.standard_normal((5, planes, k, 8, c)).astype(np.float32)
    pages = as_int8_pages(jnp.asarray(old)) if kind == "int8" else jnp.asarray(old)

    def step(pages, made, ops):
        pages = ops.write(pages, made["keys"], made["values"] if planes == 2 else None, batch)
        how = {"window": 6, "scale": 0.3, "softcap": 20.0, "sinks": made["sinks"]}
        return pages, ops.attend(made["queries"], pages, batch, **how)

    mesh = make_mesh(MeshConfig(tensor=4))
    config = replace(MODEL, heads=8, kv_heads=4) if planes == 2 else LATENT
    split = jax.device_put(pages, pages_sharding(config, mesh))
    one, four = (jax.jit(step, static_argnums=2)(p, made, PagedOps(mesh=m)) for p, m in ((pages, None), (split, mesh)))
    for expected, got in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    spread = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data.size * (4 if planes == 2 else 1), four[0])
    assert spread == jax.tree.map(lambda leaf: leaf.size, four[0])
    assert four[1].addressable_shards[0].data.size * 4 == four[1].size, "queries whole on a device"
