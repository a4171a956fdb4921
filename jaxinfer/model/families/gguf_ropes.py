"""Reading the rotary embedding of a GGUF file: llama.cpp's metadata, and the tensors that stretch it.

Knows: which fields and tensors there are and what llama.cpp makes of each. Knows no family: what a family alone
decides (its theta, whether it turns part of a head, how yarn rounds) is an argument.

Sources: llama.cpp's llama-model.cpp and llama-context.cpp, and its converter from Hugging Face's files.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families.fields import Fields
from jaxinfer.model.families.ropes import part_of, yarn_scale
from jaxinfer.model.rope import rope_frequencies

ROPE_FREQS = "rope_freqs.weight"
ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
ROPE_TENSORS = (ROPE_FREQS, *ROPE_FACTORS)
"""Tensors of a GGUF file that belong to no layer: what the frequencies of its rope are divided by."""


def rope_from_gguf(
    fields: Fields,
    shapes: Mapping[str, tuple[int, ...]],
    prefix: str,
    head_dim: int,
    *,
    theta: float = 10_000.0,
    partial: bool = False,
    truncate: bool = True,
    mscale_all_dim: float | None = None,
) -> RopeConfig:
    """The rotary embedding of a GGUF file of architecture `prefix`, but for what stands in `ROPE_TENSORS`.

    The loader passes those to `with_rope_factors`. A file without a type is linear, by a factor that is 1 where it has
    none, as llama.cpp reads it. head_dim and partial: as for `read_rope`, with `rope.dimension_count` for the size of
    the part. truncate: whether this family's yarn rounds its bounds, for no file says so; llama.cpp always rounds.
    mscale_all_dim: for a family that stores it; both mscales are then that number, as llama.cpp takes them, and cancel.
    Raises ConfigError for another type, or a field that changes the arithmetic and is not understood.
    """
    scaling = f"{prefix}.rope.scaling"
    fields.expect(f"{scaling}.type", "linear", "none", "yarn", "longrope")
    fields.expect(f"{scaling}.alpha", None)
    size = fields.whole(f"{prefix}.rope.dimension_count", head_dim)
    if not partial:
        fields.expect(f"{prefix}.rope.dimension_count", head_dim)
    rope = RopeConfig(
        theta=fields.number(f"{prefix}.rope.freq_base", theta),
        attention_factor=fields.number(f"{scaling}.attn_factor", 1.0),
        dim=part_of(size, head_dim),
    )
    kind, factor = fields.get(f"{scaling}.type", "linear"), _gguf_factor(fields, prefix)
    original = fields.whole(f"{scaling}.original_context_length", fields.whole(f"{prefix}.context_length"))
    if kind == "yarn":
        yarn = dataclasses.replace(rope, kind="yarn", factor=factor, original_context=original, truncate=truncate)
        return _gguf_yarn(yarn, fields, scaling, mscale_all_dim)
    fields.expect(f"{scaling}.yarn_ext_factor", None, -1.0, 0.0)  # of any other type it would turn yarn on
    if kind == "linear" and not _has_factors(shapes):
        return dataclasses.replace(rope, kind="linear", factor=factor) if factor != 1 else rope
    fields.expect(f"{scaling}.factor", None, 0.0, 1.0)
    fields.expect(f"{prefix}.rope.scale_linear", None, 0.0, 1.0)
    if kind == "longrope" and not _has_factors(shapes):
        raise ConfigError(f"{fields.where}: {scaling}.type is longrope; expected the tensors {', '.join(ROPE_FACTORS)}")
    return dataclasses.replace(rope, original_context=original) if _has_factors(shapes) else rope


def _has_factors(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return any(name in shapes for name in ROPE_FACTORS)


def _gguf_factor(fields: Fields, prefix: str) -> float:
    """How far the context is stretched, under its name or an older one; 0 stands for not at all."""
    name = f"{prefix}.rope.scaling.factor"
    name = name if fields.get(name) is not None else f"{prefix}.rope.scale_linear"
    return 1.0 if fields.get(name, 0) == 0 else fields.number(name)


def _gguf_yarn(rope: RopeConfig, fields: Fields, scaling: str, mscale_all_dim: float | None) -> RopeConfig:
    """`rope` with YaRN's own fields.

    The converter stores transformers' attention_factor as yarn_attn_factor, which llama.cpp multiplies its own growth
    by, or passes over: only the number that makes no difference is read.
    """
    fields.expect(f"{scaling}.yarn_ext_factor", None, -1.0, 1.0)
    growth = yarn_scale(rope.factor)
    if not math.isclose(fields.number(f"{scaling}.yarn_attn_factor", growth), growth, rel_tol=1e-6):
        raise ConfigError(
            f"{fields.where}: {scaling}.yarn_attn_factor is {fields.get(f'{scaling}.yarn_attn_factor')}; expected "
            f"none, or {growth}: nothing else is implemented"
        )
    if mscale_all_dim is None:
        fields.expect(f"{scaling}.yarn_log_multiplier", None, 0.0)
    return dataclasses.replace(
        rope,
        beta_fast=fields.number(f"{scaling}.yarn_beta_fast", 32.0),
        beta_slow=fields.number(f"{scaling}.yarn_beta_slow", 1.0),
        attention_factor=rope.attention_factor * (1.0 if mscale_all_dim else growth),
    )


def with_rope_factors(config: ModelConfig, factors: Mapping[str, Float[np.ndarray, " half"]]) -> ModelConfig:
    """The configuration whose rope is stretched as the tensors of a GGUF file say: those of `ROPE_TENSORS` it has.

    `rope_freqs.weight` holds what each frequency is divided by, and not the rule behind it: Llama 3's where it gives
    these numbers, else the numbers as they are. The pair of `ROPE_FACTORS` is longrope's. Raises ConfigError for other
    combinations, for tensors that do not fit the head, and for a rope that is stretched already.
    """
    if not factors:
        return config
    size = config.rope.turning(config.latent.rope_dim if config.latent else config.head_dim)
    for name, divisors in factors.items():
        if divisors.shape != (size // 2,) or not np.all(np.isfinite(divisors) & (divisors > 0)):
            raise ConfigError(f"{name} of shape {divisors.shape} holds no divisors of {size // 2} frequencies")
    if config.rope.kind != "default" or set(factors) not in ({ROPE_FREQS}, set(ROPE_FACTORS)):
        raise ConfigError(
            f"GGUF file has {', '.join(factors)} for a rope of kind {config.rope.kind}; expected {ROPE_FREQS}, or "
            f"{' and '.join(ROPE_FACTORS)}, for one that is not stretched"
        )
    first = next(iter(factors.values()))
    short, long = (factors.get(name, first) for name in ROPE_FACTORS)
    rope = _llama3_of(config.rope, short, size) if ROPE_FREQS in factors else None
    stretched = {"kind": "longrope", "short_factors": tuple(short.tolist()), "long_factors": tuple(long.tolist())}
    return dataclasses.replace(config, rope=rope or dataclasses.replace(config.rope, **stretched))


def _llama3_of(rope: RopeConfig, divisors: Float[np.ndarray, " half"], size: int) -> RopeConfig | None:
    """Llama 3's rule, where it gives `divisors`: every Llama 3.x has it, but for its factor, the last divisor."""
    if divisors[-1] < 1:
        return None
    stretch = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8_192}
    llama3 = dataclasses.replace(rope, kind="llama3", factor=float(divisors[-1]), **stretch)
    plain, stretched = (rope_frequencies(kind, size, 8_192) for kind in (dataclasses.replace(rope, dim=None), llama3))
    return llama3 if np.allclose(plain / stretched, divisors, rtol=1e-4) else None
