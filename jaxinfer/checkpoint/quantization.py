"""What `quantization_config` says of a Hugging Face directory, and its tensors decoded accordingly.

Knows: which methods are read and what each must say. The decoding itself is `fp8`'s and `mxfp4`'s.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxinfer.checkpoint.fp8 import FLOAT8, Fp8Scheme, Fp8Tensors
from jaxinfer.checkpoint.mxfp4 import Mxfp4Tensors
from jaxinfer.checkpoint.safetensors import SafetensorsDirectory
from jaxinfer.checkpoint.tensors import Tensors
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.model.families.fields import Fields

_WHERE = "config.json quantization_config"


class Decoded(NamedTuple):
    """Tensors as an unquantised checkpoint has them, and the names among them that nobody reads."""

    tensors: Tensors
    unused: tuple[str, ...] = ()


def decoded(stored: SafetensorsDirectory, config: Mapping[str, Any]) -> Decoded:
    """The tensors of `stored` as `config`, the whole `config.json`, says they are quantised.

    Raises ConfigError, naming the field, for a method or a variant that is not read; CheckpointError where the tensors
    are not those of the method. Without a method float8 is cast as it is.
    """
    fields = Fields(Fields(config, "config.json").mapping("quantization_config"), _WHERE)
    if not fields.raw:
        _check_plain(stored)
        return Decoded(stored)
    match fields.get("quant_method"):
        case "mxfp4":
            return Decoded(Mxfp4Tensors(stored))
        case "fp8":
            scheme = _fine_grained(fields)
        case "compressed-tensors":
            scheme = _compressed(fields)
        case "modelopt":
            fields.expect("quant_algo", "FP8")
            scheme = Fp8Scheme(("_scale",), ("tensor",))
        case other:
            raise ConfigError(f"{_WHERE}: quant_method is {other!r:.80}; it is not implemented")
    tensors = Fp8Tensors(stored, scheme)
    return Decoded(tensors, tensors.unused)


def _check_plain(stored: SafetensorsDirectory) -> None:
    for name, dtype in stored.dtypes.items():
        if dtype not in ("F32", "BF16", "F16", *FLOAT8):
            raise CheckpointError(f"tensor {name!r} is stored as {dtype}, and config.json says nothing of quantisation")


def _fine_grained(fields: Fields) -> Fp8Scheme:
    """transformers' `fp8`: blocks, or one scale a tensor. AutoFP8 has the same name and calls its scales otherwise."""
    fields.expect("activation_scheme", "dynamic", "static")
    fields.expect("scale_fmt", "float", "ue8m0")
    fields.expect("expert_dtype", "fp8")
    suffixes = ("_scale_inv", "_scale")
    if "weight_block_size" not in fields.raw:  # transformers takes blocks of 128 then, AutoFP8 has none
        return Fp8Scheme(suffixes, ("tensor", "block"), (128, 128))
    if fields.raw["weight_block_size"] is None:
        return Fp8Scheme(suffixes, ("tensor",))
    return Fp8Scheme(suffixes, ("block",), _block(fields, "weight_block_size"))


def _compressed(fields: Fields) -> Fp8Scheme:
    """compressed-tensors' `float-quantized`; several groups of modules may have scales of several layouts."""
    fields.expect("format", "float-quantized")
    fields.expect("quantization_status", "compressed", "frozen")
    Fields(fields.mapping("sparsity_config"), f"{_WHERE} sparsity_config").expect("format", "dense")
    fields.expect("transform_config", None, {})
    strategies, block = [], (1, 1)
    groups = Fields(fields.mapping("config_groups"), f"{_WHERE} config_groups")
    for name in groups.raw:
        group = Fields(groups.mapping(name), f"{groups.where} {name}")
        group.expect("format", "float-quantized")
        weights = Fields(group.mapping("weights"), f"{group.where} weights")
        for field, only in (("type", "float"), ("num_bits", 8), ("symmetric", True), ("dynamic", False)):
            weights.expect(field, only)
        weights.expect("strategy", "tensor", "channel", "block")
        strategies.append(weights.get("strategy", "tensor"))
        if strategies[-1] == "block":
            block = _block(weights, "block_structure")
    return Fp8Scheme(("_scale",), tuple(dict.fromkeys(strategies)), block)


def _block(fields: Fields, name: str) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    value = fields.get(name)
    whole = isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value)
    if not whole or len(value) != 2:
        raise ConfigError(f"{fields.where}: {name} is {value!r:.80}; expected two positive whole numbers")
    return value[0], value[1]
