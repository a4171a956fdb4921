"""Jinja as chat templates use it, in a sandbox that bounds what a template may spend.

Knows: Jinja. Does not know messages or tokenizers. A template comes with a checkpoint, so it may be hostile: loop
turns, calls and seconds are counted, and the size of what joining, replacing and repeating give is checked before it is
made. Attribute access is Jinja's own immutable sandbox. Not bounded: printing a list that holds one list many times.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, cast

from jinja2 import Environment, TemplateError, nodes, pass_context, pass_environment
from jinja2.ext import Extension
from jinja2.filters import do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from jaxinfer.errors import CheckpointError, RequestError

MAX_SOURCE = 256 * 1024
"""Characters of a template; the longest published ones have about 20,000."""
MAX_TEXT = 8 * 1024 * 1024
"""Characters of the output, and of any text or list on the way to it."""
MAX_BITS = 8_192
"""Of any whole number on the way."""
MAX_STEPS = 1_000_000
"""Loop turns and calls of one rendering."""
MAX_SECONDS = 5.0

_METER = "\0meter"  # no template can spell this name


class Refused(Exception):
    """The template called `raise_exception`; the message is for the caller."""


@dataclass
class _Meter:
    """What one rendering has spent."""

    steps: int = 0
    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def tick(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS or time.monotonic() > self.deadline:
            raise RequestError(f"the chat template ran for {self.steps} steps on these messages; shorten them")


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_TEXT:
        raise RequestError(f"the chat template made a value of length {len(value)}; at most {MAX_TEXT} is allowed")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise RequestError(
            f"the chat template made a number of {value.bit_length()} bits; at most {MAX_BITS} is allowed"
        )
    return value


class _Environment(ImmutableSandboxedEnvironment):
    """Meters calls and the operators that make long values from short ones."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        context.resolve(_METER).tick()
        for value in (*args, *kwargs.values()):
            _check_number(value)
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps str.format
        if isinstance(text := getattr(method, "__self__", None), str):
            obj = _bounded_method(text, method.__name__) or obj
        return _bounded(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_product(operator, left, right)
        return _bounded(super().call_binop(context, operator, left, right))


def _bounded_method(text: str, name: str) -> Callable[..., str] | None:
    """A stand-in for the methods whose result may be far longer than what they are given; None for all others."""
    if name in ("format", "format_map", "expandtabs"):
        raise RequestError(f"the chat template formats with {name}; only joining is allowed")
    return {"replace": partial(_replaced, text), "join": partial(_joined, separator=text)}.get(name)


def _replaced(text: Any, old: Any, new: Any, count: int | None = -1) -> str:
    text, old, new, most = str(text), str(old), str(new), -1 if count is None else count
    found = text.count(old)
    _check_length(len(text) + (found if most < 0 else min(found, most)) * len(new))
    return text.replace(old, new, most)


def _joined(items: Iterable[Any], separator: str = "") -> str:
    """What `~` and `join` mean, with the size checked first."""
    parts = [str(item) for item in items]
    _check_length(sum(map(len, parts)) + len(separator) * len(parts))
    return separator.join(parts)


@pass_environment
def _join(environment: Environment, items: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's filter."""
    return _joined(items if attribute is None else map(make_attrgetter(environment, attribute), items), d)


def _check_length(length: int) -> None:
    if length > MAX_TEXT:
        raise RequestError(f"the chat template makes a text of length {length}; at most {MAX_TEXT} is allowed")


def _check_number(value: Any) -> None:
    """Numbers as arguments are widths and counts: `"x".ljust(10**9)`."""
    if isinstance(value, int) and abs(value) > MAX_TEXT:
        raise RequestError(f"the chat template passes a number above {MAX_TEXT} to a call")


def _check_product(operator: str, left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if operator == "*" and hasattr(value, "__len__") and isinstance(times, int) and len(value) * times > MAX_TEXT:
            raise RequestError(f"the chat template repeats a value {times} times; at most {MAX_TEXT} items are allowed")
    if operator == "**" and not (_is_small(left, 2**64) and _is_small(right, 64)):
        raise RequestError("the chat template raises a number above 2**64, or to a power above 64")
    if operator == "%" and isinstance(left, str):
        raise RequestError("the chat template formats with %; only joining is allowed")


def _is_small(value: Any, bound: int) -> bool:
    return isinstance(value, int | float) and abs(value) <= bound


@pass_context
def _metered(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """A loop's items, each turn counted."""
    meter = context.resolve(_METER)
    for item in items:
        meter.tick()
        yield item


class _Metering(NodeTransformer):
    """Puts the two filters above into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(cast(nodes.Expr, node.iter), "\0metered")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "\0joined")


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model should be trained on; its content is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _raise_exception(message: str) -> None:
    raise Refused(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, without the escapes that Jinja's own filter adds for HTML."""
    _check_indent(indent or 0)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's filter, for widths up to 64."""
    _check_indent(width)
    return do_indent(text, width, first, blank)


def _check_indent(width: Any) -> None:
    if not isinstance(width, int) or not 0 <= width <= 64:
        raise RequestError(f"the chat template indents by {width!r:.40}; at most 64 spaces are allowed")


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    for unbounded in ("batch", "center", "format", "round", "slice", "wordwrap"):
        del environment.filters[unbounded]
    environment.filters |= {"tojson": _tojson, "indent": _indent, "join": _join, "replace": _replaced}
    environment.filters |= {"\0metered": _metered, "\0joined": _joined}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class Sandbox:
    """One compiled template. Raises CheckpointError where it is too long or does not compile."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise CheckpointError(f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are allowed")
        environment = _environment()
        try:
            tree = _Metering().visit(environment.parse(source))
            tree.set_environment(environment)
            self._template = environment.from_string(tree)
        except (TemplateError, SyntaxError, RecursionError) as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's output.

        Raises Refused where the template calls `raise_exception`, and RequestError where these variables make it fail
        or spend too much.
        """
        try:
            return self._collect({**variables, _METER: _Meter()})
        except (Refused, RequestError):
            raise
        except Exception as error:  # a template may fail in any way; the process must not
            raise RequestError(f"the chat template cannot render these messages: {error}") from None

    def _collect(self, variables: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        for piece in self._template.generate(variables):
            size += len(piece)
            if size > MAX_TEXT:
                raise RequestError(f"the chat template rendered more than {MAX_TEXT} characters; shorten the messages")
            pieces.append(piece)
        return "".join(pieces)
