"""The folder `params/` of our own directories: the parameter tree in Orbax's standard checkpoint.

Knows: that in place of a quantised leaf lie its arrays `values` (int8 or int4), `scale` and, where it has one,
`offset`; and that stored shapes and dtypes are hostile input. Knows no other file of the directory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Shaped

from jaxinfer.checkpoint.fill import STAGE, Progress, Shardings, check_layers, check_tensors, flatten, unflatten
from jaxinfer.checkpoint.quantise import quantise
from jaxinfer.config import ModelConfig, QuantizeName
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.model.families import Leaf
from jaxinfer.model.families.leaves import Source
from jaxinfer.model.quantised import Kind, Quantised, fits_groups, is_quantised, quantisable, spread
from jaxinfer.model.transformer import abstract_params

Leaves = dict[tuple[str, ...], Any]
"""Leaves of the parameter tree by path; some are of type Quantised."""
_VALUES, _SCALE, _OFFSET = "values", "scale", "offset"


def save_params(path: Path, params: Any) -> None:
    """Write the parameter tree into the new folder `path`."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, jax.tree.map(_as_dict, params, is_leaf=is_quantised))


def restore_params(
    path: Path,
    config: ModelConfig,
    dtype: str,
    quantize: QuantizeName | None,
    shardings: Shardings | None,
    progress: Progress | None,
) -> Any:
    """The parameter tree in the folder `path`, each leaf in its dtype and place; quantised leaves stay what they are.

    int8 and int4 are made of plain leaves, one at a time in host memory. Raises CheckpointError where the folder is
    damaged or is that of another model, ConfigError where `quantize` is "stored" and no leaf is quantised, or is int8
    or int4 and one is already.
    """
    leaves = _read_leaves(path, config, dtype)
    _check_quantize(quantize, leaves)
    try:
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        places = flatten(shardings(config)) if shardings else dict.fromkeys(leaves, here)
        if quantize == "int8" or quantize == "int4":
            return _restore_each(path, leaves, places, quantize, progress)
        return _restore_all(path, leaves, places, progress)
    except Exception as error:  # Orbax and TensorStore raise anything, a plain Exception for a damaged file
        raise CheckpointError(f"{path.name} cannot be restored by Orbax: {error!s:.300}") from error


def read_param_structs(path: Path, config: ModelConfig, dtype: str, quantize: QuantizeName | None) -> Any:
    """The tree that `restore_params` makes, as shapes and dtypes; no weight is read. Raises as it does."""
    leaves = _read_leaves(path, config, dtype)
    _check_quantize(quantize, leaves)
    if quantize == "int8" or quantize == "int4":
        return abstract_params(config, dtype, quantize)
    return unflatten(leaves)


def _read_leaves(path: Path, config: ModelConfig, dtype: str) -> Leaves:
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            stored = flatten(checkpointer.metadata(path).item_metadata.tree)
    except Exception as error:  # Orbax and TensorStore raise anything for what is missing or damaged
        raise CheckpointError(f"{path.name} cannot be restored by Orbax: {error!s:.300}") from error
    return _leaves(config, dtype, stored)


def _as_dict(leaf: Any) -> Any:
    if not isinstance(leaf, Quantised):
        return leaf
    parts = {_VALUES: leaf.values, _SCALE: leaf.scale, _OFFSET: leaf.offset}
    return {name: part for name, part in parts.items() if part is not None}


def _leaves(config: ModelConfig, dtype: str, stored: Mapping[tuple[str, ...], Any]) -> Leaves:
    """The leaves that `config` asks for, plain or quantised as `stored` has them; CheckpointError where it cannot."""
    check_layers(config, len(stored))
    plain = flatten(abstract_params(config, dtype))
    leaves = {
        path: _quantised(path, leaf, stored) if (*path, _VALUES) in stored and quantisable(path) else leaf
        for path, leaf in plain.items()
    }
    expected = flatten(unflatten({path: _as_dict(leaf) for path, leaf in leaves.items()}))
    wanted = [Leaf(p, x.shape, (Source("/".join(p), x.shape, x.shape),)) for p, x in expected.items()]
    check_tensors(wanted, {"/".join(path): leaf.shape for path, leaf in stored.items()})
    return leaves


def _quantised(path: tuple[str, ...], leaf: jax.ShapeDtypeStruct, stored: Mapping[tuple[str, ...], Any]) -> Quantised:
    values = stored[(*path, _VALUES)]
    if jnp.dtype(values.dtype) not in (jnp.int8, jnp.int4):
        raise CheckpointError(f"{'/'.join(path)} has values of {values.dtype}; expected int8 or int4")
    scale, offset = (_groups(path, leaf, name, stored.get((*path, name))) for name in (_SCALE, _OFFSET))
    return Quantised(jax.ShapeDtypeStruct(leaf.shape, values.dtype), scale, offset, leaf.dtype.name)


def _groups(path: tuple[str, ...], leaf: jax.ShapeDtypeStruct, name: str, stored: Any) -> Any:
    if stored is None and name == _OFFSET:
        return None
    where = "/".join((*path, name))
    if stored is None:
        raise CheckpointError(f"{where} is missing beside the values")
    if not fits_groups(path, leaf.shape, tuple(stored.shape)):
        raise CheckpointError(f"{where} has shape {tuple(stored.shape)}, which are no groups of {leaf.shape}")
    if jnp.dtype(stored.dtype) not in (jnp.float32, jnp.bfloat16):
        raise CheckpointError(f"{where} is {stored.dtype}; expected float32 or bfloat16")
    return jax.ShapeDtypeStruct(tuple(stored.shape), stored.dtype)


def _check_quantize(quantize: QuantizeName | None, leaves: Leaves) -> None:
    quantised = [path for path, leaf in leaves.items() if isinstance(leaf, Quantised)]
    if quantize == "stored" and not quantised:
        raise ConfigError("quantize is 'stored', but the directory holds plain weights alone; choose int8 or int4")
    if quantize not in (None, "stored") and quantised:
        raise ConfigError(
            f"quantize is {quantize!r}, but {'/'.join(quantised[0])} was quantised when the directory was made; leave "
            "quantize out, or convert the model anew"
        )


def _restore_all(path: Path, leaves: Leaves, places: Mapping[tuple[str, ...], Any], progress: Progress | None) -> Any:
    """Straight to the devices, all leaves at once."""
    if progress:
        progress(STAGE, 0, 1)
    wanted = {at: jax.tree.map(_target, leaf, spread(leaf, places[at])) for at, leaf in leaves.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(path, unflatten({at: _as_dict(leaf) for at, leaf in wanted.items()}))
    if progress:
        progress(STAGE, 1, 1)
    return unflatten({at: _as_leaf(leaf, _at(found, at)) for at, leaf in leaves.items()})


def _target(part: jax.ShapeDtypeStruct, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=place)


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _as_leaf(wanted: Any, found: Any) -> Any:
    if not isinstance(wanted, Quantised):
        return found
    return Quantised(found[_VALUES], found[_SCALE], found.get(_OFFSET), wanted.dtype)


def _restore_each(
    path: Path, leaves: Leaves, places: Mapping[tuple[str, ...], Any], kind: Kind, progress: Progress | None
) -> Any:
    """Through host memory, one leaf after the other, where matrices become `kind`."""
    made: Leaves = {}
    for done, (at, leaf) in enumerate(leaves.items()):
        if progress:
            progress(STAGE, done, len(leaves))
        value = _restore_one(path, at, leaf)
        value = quantise(at, value, kind) if quantisable(at) else value
        made[at] = jax.block_until_ready(jax.device_put(value, spread(value, places[at])))
    if progress:
        progress(STAGE, len(leaves), len(leaves))
    return unflatten(made)


def _restore_one(path: Path, at: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> Shaped[np.ndarray, "..."]:
    how = ocp.args.PyTreeRestore(
        item=unflatten({at: leaf}),
        restore_args=unflatten({at: ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)}),
        partial_restore=True,
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        return _at(checkpointer.restore(path, args=how), at)
