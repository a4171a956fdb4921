"""Configuration is checked when it is made, and what follows from it is what the engine compiles."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config import CacheConfig, EngineConfig, MeshConfig, ModelConfig, RopeConfig
from jaxinfer.errors import ConfigError

TINY = ModelConfig(
    family="llama",
    vocab_size=32,
    width=8,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_width=16,
    context=64,
    query_scale=0.5,
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"layers": -1}, "layers"),
        ({"heads": 3}, "kv_heads"),
        ({"head_dim": 3}, "head_dim"),
        ({"windows": (4,)}, "windows"),
        ({"context": 1.5}, "context"),
    ],
)
def test_a_model_that_cannot_work_is_refused_by_name(change, named):
    with pytest.raises(ConfigError, match=named):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: RopeConfig(theta=0), "theta"),
        (lambda: RopeConfig(kind="yarn2"), "yarn2"),
        (lambda: RopeConfig(kind="llama3", low_freq_factor=4, high_freq_factor=1), "high_freq_factor"),
        (lambda: RopeConfig(factor=0.5), "factor"),
        (lambda: CacheConfig(page_size=7), "page_size"),
        (lambda: CacheConfig(pages=0), "pages"),
        (lambda: CacheConfig(memory_fraction=0), "memory_fraction"),
        (lambda: CacheConfig(dtype="int4"), "the cache's dtype is 'int4'"),
        (lambda: MeshConfig(tensor=0), "tensor"),
        (lambda: EngineConfig(slots=0), "slots"),
        (lambda: EngineConfig(context=1), "context"),
        (lambda: EngineConfig(queue=0), "queue"),
        (lambda: EngineConfig(chunk=0), "at least one page"),
        (lambda: EngineConfig(kernels=(("kv_write", "xla"), ("kv_write", "tpu"))), "kv_write=xla, kv_write=tpu"),
        (lambda: EngineConfig(chunk=100), "chunk"),
        (lambda: EngineConfig(dtype="int8"), "dtype"),
    ],
)
def test_an_engine_that_cannot_work_is_refused_by_name(make, named):
    with pytest.raises(ConfigError, match=named):
        make()


def test_only_layers_with_a_window_use_the_local_rope():
    local = RopeConfig(theta=10.0)
    config = dataclasses.replace(TINY, windows=(4, None), local_rope=local)
    assert (config.window(0), config.window(1)) == (4, None)
    assert (config.layer_rope(0), config.layer_rope(1)) == (local, config.rope)


@given(st.integers(1, 300), st.integers(1, 40))
def test_buckets_are_sorted_distinct_and_end_at_the_largest_step(slots, pages):
    engine = EngineConfig(slots=slots, chunk=pages * 64)
    for buckets, largest in ((engine.decode_buckets, slots), (engine.prefill_buckets, pages * 64)):
        assert list(buckets) == sorted(set(buckets))
        assert buckets[-1] == largest


def test_deterministic_pins_one_bucket_each():
    engine = EngineConfig(slots=8, deterministic=True)
    assert engine.decode_buckets == (8,)
    assert engine.prefill_buckets == (engine.chunk,)


def test_int8_pages_have_tokens_for_whole_rows_of_lanes_unless_told_otherwise():
    assert [CacheConfig().tokens, CacheConfig(dtype="int8").tokens] == [64, 128]
    assert [CacheConfig(page_size=16, dtype=dtype).tokens for dtype in (None, "int8")] == [16, 16]
    with pytest.raises(ConfigError, match="chunk is 64; expected a multiple of page_size 128"):
        EngineConfig(chunk=64, cache=CacheConfig(dtype="int8"))
