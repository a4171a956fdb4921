"""Reading the rotary embedding of a Hugging Face `config.json`: its `rope_scaling` or `rope_parameters`.

Knows: each kind's fields and their defaults, and which fields a kind does not have. Knows no family: what a family
alone decides, its theta and whether it turns part of a head, is an argument.

Source: transformers' modeling_rope_utils (5.24).
"""

import math
from collections.abc import Mapping
from typing import Any, get_args

from jaxinfer.config import RopeConfig, RopeKind
from jaxinfer.errors import ConfigError
from jaxinfer.model.families.fields import MAX_WHOLE, Fields

_FIELDS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
}
_FIELDS_OF_ALL = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_HARMLESS = {"finetuned"}  # says how the model was made
_OTHER_NAMES = {"su": "longrope"}  # as Phi-3 first spelled it
_NONE: Mapping[str, Any] = {}


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of the attention with the stretch: 0.1 mscale ln(factor) + 1 (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def stretched_context(rope: RopeConfig, positions: int) -> int:
    """Most tokens of a sequence, for a model whose file says `positions`.

    With yarn and dynamic many files say how long a sequence was before the stretch: it is then `original_context` x
    `factor`, as in vLLM. The files of every other kind say how long it may be after it.
    """
    if rope.kind not in ("yarn", "dynamic"):
        return positions
    return max(positions, int(min(rope.original_context * rope.factor, MAX_WHOLE)))


def yarn_growth(fields: Fields, rope: RopeConfig) -> float:
    """What DeepSeek multiplies q.k by besides 1 / sqrt(head_dim), because its rope is stretched (arXiv 2412.19437).

    yarn_scale(factor, mscale_all_dim) squared; 1 where `config.json` gives no mscale_all_dim. (Queries and keys that
    turn are multiplied by `attention_factor` besides, which divides by that very mscale.)
    """
    spec = Fields(fields.mapping("rope_parameters") or fields.mapping("rope_scaling"), f"{fields.where} rope")
    return yarn_scale(rope.factor, _mscale(spec, "mscale_all_dim")) ** 2


def rope_from_hf(fields: Fields, head_dim: int, *, theta: float = 10_000.0, partial: bool = False) -> RopeConfig:
    """The rotary embedding of a `config.json` whose layers all turn alike.

    transformers 4 writes `rope_theta` beside `rope_scaling`; 5 writes both into `rope_parameters`. theta is the
    family's, for a file without; the other arguments, and what it raises, are `read_rope`'s. Raises ConfigError too
    where the file has both objects and they say different things.
    """
    theta = fields.number("rope_theta", theta)
    names = [name for name in ("rope_parameters", "rope_scaling") if fields.mapping(name)]
    specs = {f"{fields.where} {name}": fields.mapping(name) for name in names} or {f"{fields.where} rope": _NONE}
    ropes = [read_rope(fields, spec, theta, where, head_dim, partial=partial) for where, spec in specs.items()]
    if len(set(ropes)) > 1:
        raise ConfigError(
            f"{fields.where}: rope_parameters and rope_scaling say different things; expected one of them"
        )
    return ropes[0]


def read_rope(
    fields: Fields, spec: Mapping[str, Any], theta: float, where: str, head_dim: int, *, partial: bool = False
) -> RopeConfig:
    """The rotary embedding that `spec`, one `rope_scaling` or `rope_parameters` object, describes.

    fields: the whole configuration, for what stands beside the object: `max_position_embeddings`, which must be there,
    `original_max_position_embeddings` (which wins over the object's), `partial_rotary_factor` (over which the
    object's wins). theta: where the object has none. head_dim: features of a head that may turn; of
    latent attention those of the part that does. partial: the family turns only the first `partial_rotary_factor` of
    them. `type` is the older
    spelling of `rope_type`. Raises ConfigError for an unknown kind, a field that the kind does not have, a part of a
    head where the family turns whole ones, or a value out of range.
    """
    rope = Fields(spec, where)
    kind = _kind(rope)
    for name in spec:
        if rope.get(name) is not None and name not in _FIELDS[kind] | _FIELDS_OF_ALL | _HARMLESS:
            raise ConfigError(f"{where}: {name} is {spec[name]!r:.80}; rope of kind {kind} has no such field")
    positions = fields.whole("max_position_embeddings")
    written = "original_max_position_embeddings"
    original = (rope if fields.get(written) is None else fields).whole(written, positions)
    return RopeConfig(
        theta=rope.number("rope_theta", theta),
        kind=kind,
        dim=_turning(rope, fields, head_dim, partial),
        **_fields_of_kind(kind, rope, original, positions),
    )


def _kind(rope: Fields) -> RopeKind:
    spelled = {name: rope.raw[name] for name in ("rope_type", "type") if rope.get(name) is not None}
    kinds = {_OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else None for kind in spelled.values()}
    kind = kinds.pop() if kinds else "default"
    for known in get_args(RopeKind):
        if kind == known and not kinds:
            return known
    raise ConfigError(f"{rope.where}: rope is {spelled!r:.80}; expected one of {', '.join(get_args(RopeKind))}")


def _turning(rope: Fields, fields: Fields, head_dim: int, partial: bool) -> int | None:
    """How many features turn, None for all; a family that turns whole heads refuses any part of one."""
    name = "partial_rotary_factor"
    fields.get(name)  # read in any case: transformers 5 writes it in both places
    inner = rope if rope.get(name) is not None else fields
    if not partial:
        inner.expect(name, 1.0)
    return part_of(int(min(head_dim * inner.number(name, 1.0), MAX_WHOLE)), head_dim)


def part_of(size: int, head_dim: int) -> int | None:
    """`RopeConfig.dim` where `size` of a head's `head_dim` features turn."""
    return None if size == head_dim else size


def _fields_of_kind(kind: RopeKind, rope: Fields, original: int, positions: int) -> dict[str, Any]:
    """RopeConfig's fields that are read in a way of the kind's own."""
    match kind:
        case "default":
            return {}
        case "linear":
            return {"factor": rope.number("factor")}
        case "dynamic":
            return _dynamic(rope, original, positions)
        case "llama3":
            numbers = {name: rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
            return {"original_context": original, **numbers}
        case "yarn":
            return _yarn(rope, original, positions)
        case "longrope":
            return _longrope(rope, original, positions)


def _dynamic(rope: Fields, original: int, positions: int) -> dict[str, Any]:
    """transformers stretches past `max_position_embeddings`, and reads no other original context."""
    if original != positions:
        raise ConfigError(
            f"{rope.where}: original_max_position_embeddings is {original}; a rope of kind dynamic stretches past "
            f"max_position_embeddings, {positions}"
        )
    return {"factor": rope.number("factor"), "original_context": positions}


def _yarn(rope: Fields, original: int, positions: int) -> dict[str, Any]:
    factor = rope.number("factor", positions / original)
    mscale, mscale_all = _mscale(rope, "mscale"), _mscale(rope, "mscale_all_dim")
    growth = (
        yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all) if mscale and mscale_all else yarn_scale(factor)
    )
    return {
        "factor": factor,
        "original_context": original,
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "truncate": rope.flag("truncate", True),
        "attention_factor": rope.number("attention_factor", growth),
    }


def _mscale(rope: Fields, name: str) -> float:
    """0, as DeepSeek's own default, is the same as absent."""
    return 0.0 if rope.get(name, 0) == 0 else rope.number(name)


def _longrope(rope: Fields, original: int, positions: int) -> dict[str, Any]:
    """`factor` serves the attention factor alone (arXiv 2402.13753); the frequencies have factors of their own."""
    factor = rope.number("factor", positions / original)
    growth = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return {
        "original_context": original,
        "short_factors": _numbers(rope, "short_factor"),
        "long_factors": _numbers(rope, "long_factor"),
        "attention_factor": rope.number("attention_factor", growth),
    }


def _numbers(rope: Fields, name: str) -> tuple[float, ...]:
    value = rope.get(name)
    if not isinstance(value, list) or not value:
        raise ConfigError(
            f"{rope.where}: {name} is {value!r:.80}; expected a number for each pair of features that turn"
        )
    return tuple(Fields({name: number}, rope.where).number(name) for number in value)
