"""How a configuration refuses a value: the field, what it got, what it expected."""

from typing import Any

from jaxinfer.errors import ConfigError

MAX_WHOLE = 2**31 - 1


def require(ok: bool, message: str) -> None:
    """Raise ConfigError with `message` unless `ok`."""
    if not ok:
        raise ConfigError(message)


def require_number(config: Any, *names: str) -> None:
    """Positive numbers of a sane size; anything else than a number would only fail deep inside a traced step."""
    for name in names:
        value = getattr(config, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        require(number and 0 < value < 1e18, f"{name} is {value!r:.80}; expected a positive number below 1e18")


def require_whole(config: Any, *names: str, low: int = 1) -> None:
    """Whole numbers from `low` up to 2**31 - 1."""
    for name in names:
        value = getattr(config, name)
        whole = isinstance(value, int) and not isinstance(value, bool) and low <= value <= MAX_WHOLE
        expected = "a positive whole number" if low == 1 else f"a whole number from {low} up"
        require(whole, f"{name} is {value!r:.80}; expected {expected} below 2**31")


def require_flag(config: Any, *names: str) -> None:
    """True or false, and nothing that only behaves like it."""
    for name in names:
        value = getattr(config, name)
        require(isinstance(value, bool), f"{name} is {value!r:.80}; expected true or false")


def require_layers(config: Any, *names: str) -> None:
    """Tuples of layer numbers, each below `config.layers`, rising."""
    for name in names:
        value = getattr(config, name)
        whole = isinstance(value, tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
        inside = whole and list(value) == sorted(set(value)) and all(0 <= i < config.layers for i in value)
        require(inside, f"{name} is {value!r:.80}; expected rising layer numbers from 0 to {config.layers - 1}")
