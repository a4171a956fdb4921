"""The step that `jaxinfer eval` scores with, compiled for four TPUs."""

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from aot.compiling import compile_lowered, given_name, mesh
from aot.steps import config_of

from jaxinfer.engine.cache import make_pages
from jaxinfer.engine.sharding import TENSOR, pages_sharding, param_shardings
from jaxinfer.model.ops import TokenBatch
from jaxinfer.model.quantised import spread_all
from jaxinfer.model.transformer import abstract_params
from jaxinfer.perplexity import PAGE, scoring_step

TOKENS = 128


def test_each_layer_calls_its_kernels_on_every_device():
    config = replace(config_of("llama3.1-8b"), layers=1, vocab_size=2_048, context=TOKENS)
    devices, dtype = mesh("v6e", 4, TENSOR), "bfloat16"

    def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = abstract_params(config, dtype, "int8")
    params = jax.tree.map(placed, params, spread_all(params, param_shardings(config, devices)))
    made = jax.eval_shape(lambda: make_pages(config, TOKENS // PAGE, PAGE, dtype, devices))
    pages = tuple(placed(page, pages_sharding(config, devices)) for page in made)
    shapes = (1, TOKENS), (1, TOKENS), (1, TOKENS // PAGE), (1,), (TOKENS,)
    numbers: Any = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    step = scoring_step(config, dtype, dtype, devices)
    program = compile_lowered("v6e", devices, lambda: step.lower(params, pages, TokenBatch(*numbers[:4]), numbers[4]))
    assert Counter(map(given_name, program.calls)) == {"kv_write": 1, "paged_prefill_attention": 1}
