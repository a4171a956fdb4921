"""The mesh and what lies where on it.

Knows: which logical axis of a weight goes to which mesh axis, and which configurations can be split. Knows nothing of
steps. XLA inserts the collectives (the mesh's axes are of type Auto).
"""

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import MeshConfig, ModelConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.transformer import abstract_params, logical_axes

TENSOR = "tensor"
SPLIT_AXES = frozenset({"vocab", "kv_heads", "heads", "mlp"})
"""Logical axes that go to the mesh axis `tensor`; every other one is replicated."""


def make_mesh(config: MeshConfig) -> Mesh:
    """The first `config.tensor` devices in one row named `tensor`.

    Raises ConfigError where there are fewer. The axis is Auto: `jax.make_mesh`'s own default, Explicit, refuses the
    scatter into the page pool.
    """
    devices = jax.devices()
    if config.tensor > len(devices):
        raise ConfigError(
            f"mesh.tensor is {config.tensor}, but JAX sees {len(devices)} {devices[0].platform} device(s); lower it"
        )
    return jax.make_mesh((config.tensor,), (TENSOR,), axis_types=(AxisType.Auto,), devices=devices[: config.tensor])


def platform_of(mesh: Mesh) -> str:
    """What the mesh's devices are: cpu, gpu or tpu."""
    return mesh.devices.flat[0].platform


def check_divisible(config: ModelConfig, parts: int) -> None:
    """Raise ConfigError where the heads or an MLP of the model do not split evenly over `parts` devices."""
    for name, size in _split_sizes(config).items():
        if size % parts:
            raise ConfigError(f"mesh.tensor {parts} does not divide the model's {name} {size}; choose a divisor of it")


def _split_sizes(config: ModelConfig) -> dict[str, int]:
    """What must be divided, by name: heads (with latent attention there is one key for all) and each kind of MLP."""
    sizes = {"heads": config.heads} if config.latent else {"kv_heads": config.kv_heads}
    for experts in map(config.layer_experts, range(config.layers)):
        if experts is None:
            sizes["mlp_width"] = config.mlp_width
        else:
            sizes |= {"experts.width": experts.width, "experts.shared_width": experts.shared_width}
    return sizes


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def splits_pages(config: ModelConfig, parts: int) -> bool:
    """Whether pages are split over `parts` devices: where the heads in the cache divide evenly."""
    _, heads, _ = config.cache_shape
    return heads % parts == 0


def pages_sharding(config: ModelConfig, mesh: Mesh) -> NamedSharding:
    """One layer's pages [n, planes, k, b, c], split by head where these divide, else whole on each device."""
    split = splits_pages(config, mesh.shape[TENSOR])
    return NamedSharding(mesh, PartitionSpec(None, None, TENSOR) if split else PartitionSpec())


def param_shardings(config: ModelConfig, mesh: Mesh) -> Any:
    """The parameter tree with a NamedSharding per leaf.

    A vocabulary that the mesh does not divide is replicated. Raises ConfigError as `check_divisible` does.
    """
    check_divisible(config, mesh.shape[TENSOR])
    shapes = abstract_params(config, "float32")

    def shard(leaf: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> NamedSharding:
        parts = mesh.shape[TENSOR]
        split = [
            TENSOR if axis in SPLIT_AXES and size % parts == 0 else None
            for axis, size in zip(axes, leaf.shape, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*split))

    return jax.tree.map(shard, shapes, logical_axes(config))
