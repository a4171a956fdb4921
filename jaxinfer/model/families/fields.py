"""Typed, strict reading of a configuration that somebody else wrote.

Knows: how to say which field is wrong. Knows no family.
"""

import math
from collections.abc import Mapping
from typing import Any, get_args

from jaxinfer.config import RopeConfig, RopeKind
from jaxinfer.errors import ConfigError

MAX_LAYERS = 4096
_MAX_WHOLE = 2**31 - 1
_ROPE_FIELDS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
_ROPE_ANYWHERE = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}


class Fields:
    """A mapping whose values are checked as they are read; null counts as absent, as in Hugging Face's files.

    Every method raises ConfigError naming the field, what it got and what it expected.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is, or `default` where it is absent."""
        value = self.raw.get(name)
        return default if value is None else value

    def _fail(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {self.raw.get(name)!r:.80}; expected {expected}")

    def whole(self, name: str, default: int | None = None, high: int = _MAX_WHOLE) -> int:
        """A positive whole number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= high:
            raise self._fail(name, f"a whole number from 1 to {high}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._fail(name, "a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A positive, finite number, or None where it is absent."""
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self._fail(name, "true or false")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A nested object; empty where it is absent."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self._fail(name, "an object")
        return value

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse a value that changes the arithmetic in a way nobody implemented; absent is fine."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise self._fail(name, f"{' or '.join(map(repr, allowed))}: nothing else is implemented")


def read_rope(spec: Mapping[str, Any], theta: float, where: str) -> RopeConfig:
    """The rotary embedding that one `rope_scaling` or `rope_parameters` object describes.

    `theta` holds where the object has none. `type` is the older spelling of `rope_type`. Raises ConfigError for an
    unknown kind, or a field that this kind does not have.
    """
    fields = Fields(spec, where)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS or fields.get("type", kind) != kind:
        spelled = {name: spec[name] for name in ("rope_type", "type") if name in spec}
        raise ConfigError(f"{where}: rope is {spelled!r:.80}; expected one of {', '.join(get_args(RopeKind))}")
    fields.expect("partial_rotary_factor", 1.0)
    for name in spec:
        if fields.get(name) is not None and name not in _ROPE_FIELDS[kind] | _ROPE_ANYWHERE:
            raise ConfigError(f"{where}: {name} is {spec[name]!r:.80}; rope of kind {kind} has no such field")
    theta = fields.number("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=fields.number("factor"))
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_context=fields.whole("original_max_position_embeddings"),
    )
