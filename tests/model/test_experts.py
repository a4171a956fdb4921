"""What the layer asks of the platform. (Its values: `test_transformer.py` and the goldens.)"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxinfer.config import ExpertsConfig
from jaxinfer.engine.ops import PagedOps
from jaxinfer.model.experts import Experts
from pallas_kernels.dispatch import OPERATIONS

from .test_transformer import PLAIN


def test_scores_and_mixing_ask_for_all_bits_of_float32() -> None:
    """Without a precision a float32 product is bfloat16 on TPU and TF32 on GPU, which may choose another expert."""
    experts = ExpertsConfig(6, 2, 10)
    config = replace(PLAIN, experts=experts)
    layer, ops = (
        Experts(config, experts, jnp.bfloat16),
        PagedOps(dict.fromkeys(OPERATIONS, "reference"), platform="tpu"),
    )
    x = jnp.ones((2, 3, config.width), jnp.bfloat16)
    params = jax.eval_shape(lambda key: layer.init(key, x, ops), jax.random.key(0))
    text = jax.jit(lambda params, x: layer.apply(params, x, ops)).lower(params, x).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    wide = [line for line in products if "xf32>" in line]
    assert len(products) == 2 + 3  # of float32: scores, mixing; of bfloat16: gate, up, down
    assert len(wide) == 2
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in wide)
