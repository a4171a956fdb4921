"""Typed, strict reading of a configuration that somebody else wrote.

Knows: how to say which field is wrong. Knows no family.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import ConfigError

MAX_LAYERS = 4096
MAX_WHOLE = 2**31 - 1


class Fields:
    """A mapping whose values are checked as they are read; null counts as absent, as in Hugging Face's files.

    Every method raises ConfigError naming the field, what it got and what it expected. `used` collects the names that
    were asked for, so that what nobody read can be told.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self.used: set[str] = set()

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """The same fields, where one that is not there at all has the default; one that is null stays null."""
        filled = Fields({**defaults, **self.raw}, self.where)
        filled.used = self.used
        return filled

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is, or `default` where it is absent."""
        self.used.add(name)
        value = self.raw.get(name)
        return default if value is None else value

    def _fail(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {self.raw.get(name)!r:.80}; expected {expected}")

    def whole(self, name: str, default: int | None = None, high: int = MAX_WHOLE, low: int = 1) -> int:
        """A whole number from `low` to `high`."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._fail(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._fail(name, "a positive number")
        return float(value)

    def optional_whole(self, name: str) -> int | None:
        """A positive whole number, or None where it is absent."""
        return None if self.get(name) is None else self.whole(name)

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
