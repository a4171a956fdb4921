"""The bound's arithmetic: counted from the parameter tree, by hand, and by brute force."""

import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config import ModelConfig
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


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_the_parameter_tree(tied):
    leaves = jax.tree.leaves(abstract_params(config(tied=tied), "float32"))
    assert total_weights(config(tied=tied)) == sum(math.prod(x.shape) for x in leaves if len(x.shape) > 1)


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
