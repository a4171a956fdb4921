"""The bound's arithmetic: counted from the parameter tree, by hand, and by brute force."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config import ExpertsConfig, LatentConfig, ModelConfig
from jaxinfer.model.families import config_from_hf
from jaxinfer.model.transformer import abstract_params
from jaxinfer.roofline import (
    CHIPS,
    Chip,
    Cost,
    block_weights,
    bound,
    decode_cost,
    head_weights,
    kv_bytes_per_token,
    prefill_cost,
    total_weights,
)

GOLDEN = Path(__file__).parent / "golden"


def config(*, windows: tuple[int | None, ...] = (), tied: bool = True) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=50,
        width=16,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=6,
        mlp_width=40,
        context=64,
        query_scale=0.5,
        tied_head=tied,
        windows=windows,
    )


def matrices(model):
    """Sizes of the leaves that a step multiplies by, by path: biases, norms and sinks are left out."""
    paths, _ = jax.tree_util.tree_flatten_with_path(abstract_params(model, "float32"))
    named = {"/".join(str(key.key) for key in path): math.prod(leaf.shape) for path, leaf in paths}
    return {name: size for name, size in named.items() if not name.endswith(("norm", "bias", "sinks"))}


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_the_parameter_tree(tied):
    assert total_weights(config(tied=tied)) == sum(matrices(config(tied=tied)).values())


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("tiny_*")), ids=lambda path: path.name)
def test_weights_of_every_family_are_those_of_its_parameter_tree(path):
    model = config_from_hf(json.loads((path / "config.json").read_text()))
    assert total_weights(model) == sum(matrices(model).values())


def sparse():
    """Latent attention, one dense layer, then experts and a shared MLP."""
    return replace(
        config(),
        kv_heads=4,
        latent=LatentConfig(rank=10, rope_dim=2, content_dim=4, value_dim=5, query_rank=7),
        experts=ExpertsConfig(count=8, active=3, width=12, shared_width=6),
        dense_layers=(0,),
    )


def routed(name):
    return name.split("/")[-2:] in (["experts", "gate_up"], ["experts", "down"])


@given(st.integers(1, 6))
def test_a_token_works_with_its_own_experts_alone(rows):
    model, leaves = sparse(), matrices(sparse())
    experts = sum(size for name, size in leaves.items() if routed(name))
    others = sum(size for name, size in leaves.items() if not routed(name))  # the tied embedding as the head
    cost = decode_cost(model, [1] * rows, 4)
    pairs = 4 * model.heads * model.cache_shape[2] * model.layers
    assert cost.flops == rows * (2 * (others + experts * 3 / 8) + pairs)
    held = 2 * kv_bytes_per_token(model, 4)  # one read, one written
    assert cost.bytes == 4 * (others + experts * min(8, 3 * rows) / 8) + rows * held


def test_the_last_block_reads_the_experts_of_one_token():
    model = sparse()
    assert decode_cost(model, [9], 4) == prefill_cost(model, 1, 4, start=8)
    block = 3 * model.width * 12
    read = prefill_cost(model, 2, 4).bytes - prefill_cost(model, 1, 4).bytes
    assert read == 4 * 3 * block + 2 * kv_bytes_per_token(model, 4)  # of two sparse layers the first reads 3 more


def test_a_decode_row_is_a_prefill_of_one_token():
    for windows in ((), (4, None, 7)):
        assert decode_cost(config(windows=windows), [9], 4) == prefill_cost(config(windows=windows), 1, 4, start=8)


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_cut_costs_one_more_token_through_the_last_block_and_the_head(first, second):
    model = config(windows=(4, None, 7))
    whole = prefill_cost(model, first + second, 2)
    parts = prefill_cost(model, first, 2) + prefill_cost(model, second, 2, start=first)
    last_block = beyond_keys(model) + 2 * model.heads * model.head_dim * min(first, 7)
    assert parts.flops - whole.flops == 2 * (head_weights(model) + last_block)
    assert parts.bytes > whole.bytes


def beyond_keys(model):
    """Weights of one block that a token needs to come out of it, but not to be seen by others."""
    return model.width * (2 * model.heads * model.head_dim + 3 * model.mlp_width)


def queries(layer, start, tokens):
    """Those that a step runs; in the last layer of three only the last one."""
    return range(start + (tokens - 1 if layer == 2 else 0), start + tokens)


@given(st.integers(1, 30), st.integers(0, 30))
def test_attention_counts_every_visible_pair_once(tokens, start):
    model = config(windows=(4, None, 7))
    pairs = sum(
        1
        for layer, window in enumerate((4, None, 7))
        for query in queries(layer, start, tokens)
        for key in range(query + 1)
        if window is None or query - key < window
    )
    matmuls = 2 * (block_weights(model) * tokens - beyond_keys(model) * (tokens - 1) + head_weights(model))
    assert prefill_cost(model, tokens, 2, start).flops == matmuls + 4 * model.heads * model.head_dim * pairs


@given(st.integers(1, 30), st.integers(0, 30))
def test_keys_and_values_are_read_and_written_once(tokens, start):
    model = config(windows=(4, None, 7))
    seen = {
        (layer, key)
        for layer, window in enumerate((4, None, 7))
        for query in queries(layer, start, tokens)
        for key in range(query + 1)
        if window is None or query - key < window
    }
    per_layer = kv_bytes_per_token(model, 2) // model.layers
    weights = 2 * (block_weights(model) + head_weights(model))
    moved = prefill_cost(model, tokens, 2, start).bytes - weights
    assert moved == per_layer * (len(seen) + tokens * model.layers)


def test_rows_of_a_decode_step_share_the_weights():
    model = config()
    alone = decode_cost(model, [5], 4)
    both = decode_cost(model, [5, 5], 4)
    assert both.flops == 2 * alone.flops
    assert both.bytes < 2 * alone.bytes
    assert both.intensity > alone.intensity


def test_the_ridge_parts_compute_from_memory():
    chip = Chip("round numbers", flops=1_000.0, bandwidth=10.0, memory=1.0)
    below, above = Cost(flops=990.0, bytes=10.0), Cost(flops=1_010.0, bytes=10.0)
    assert below.intensity < chip.ridge < above.intensity
    assert (bound(below, chip).limit, bound(above, chip).limit) == ("memory", "compute")
    assert bound(below, chip).seconds == 1.0
    assert bound(above, chip).seconds == 1.01
    assert bound(above, chip, devices=2).seconds == 1.01 / 2


def test_a_known_model_on_a_known_chip():
    """Llama 2 7B, bfloat16, one row: 13.2 GB of blocks and head over 819 GB/s is 16 ms a token on a TPU v5e."""
    llama = ModelConfig(
        family="llama",
        vocab_size=32_000,
        width=4_096,
        layers=32,
        heads=32,
        kv_heads=32,
        head_dim=128,
        mlp_width=11_008,
        context=4_096,
        query_scale=128**-0.5,
    )
    assert total_weights(llama) == pytest.approx(6.738e9, rel=1e-3)
    step = bound(decode_cost(llama, [1], 2), CHIPS["TPU v5e"])
    assert step.limit == "memory"
    assert step.seconds == pytest.approx(0.0161, rel=0.01)


def test_every_chip_has_a_plausible_row():
    for chip in CHIPS.values():
        assert 50 < chip.ridge < 700, chip
        assert chip.memory >= 16 * 2**30
