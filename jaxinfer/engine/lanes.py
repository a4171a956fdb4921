"""How a head's keys and values lie in a page: as the model has them, or in whole rows of a TPU's lanes.

XLA for TPU stores an array whose last axis is no multiple of 128 with another axis last, which wastes no memory. A
kernel takes arrays in the order of their axes alone, so around every call of one the whole pool would be copied. Pages
of whole lanes are stored in the order that they are declared in. The scales of int8 pages lie token by token, so these
pages have 128 tokens unless told otherwise (`jaxinfer.config.CacheConfig`).

Knows: what a page of a model looks like on each platform, and how keys, values and queries are fitted to it. Knows no
kernel.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.arrays import Keys, Values
from jaxinfer.config import ModelConfig

LANES = 128


class PageLanes(NamedTuple):
    """What stands in a page for one head and token.

    planes: 2 for a key and a value, 1 where one row is both. features: of a row, zeros behind the model's own.
    value: where in its key's row a value begins, if the two share one.
    """

    planes: int
    features: int
    value: int | None = None

    def store(self, keys: Keys, values: Values | None) -> tuple[Keys, Values | None]:
        """A step's keys and values as pages take them."""
        if self.value is not None and values is not None:
            room = _widen(keys, self.value), _widen(values, self.features - self.value)
            return jnp.concatenate(room, axis=-1), None
        return _widen(keys, self.features), None if values is None else _widen(values, self.features)

    def ask(self, queries: Float[Array, "*any c"]) -> Float[Array, "*any features"]:
        """Queries that meet keys alone: what is not a key's meets zeros."""
        return _widen(queries, self.features)

    def answer(self, mixed: Float[Array, "*any features"], features: int) -> Float[Array, "*any c"]:
        """What was mixed of the values' own `features`."""
        begin = self.value or 0
        return mixed[..., begin : begin + features]


def page_lanes(config: ModelConfig, dtype: Any, platform: str | None = None) -> PageLanes:
    """How pages of `dtype` lie on `platform` (default: JAX's own).

    On TPU a key and a value of up to 64 features share a row of 128, so that no lane is wasted. In int8 they do not,
    since each has a scale of its own.
    """
    planes, _, features = config.cache_shape
    if (platform or jax.default_backend()) != "tpu":
        return PageLanes(planes, features)
    if planes == 2 and 2 * features <= LANES and jnp.dtype(dtype) != jnp.int8:
        return PageLanes(1, LANES, LANES // 2)
    return PageLanes(planes, -(-features // LANES) * LANES)


def _widen(x: Float[Array, "*any c"], features: int) -> Float[Array, "*any features"]:
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, features - x.shape[-1])))
