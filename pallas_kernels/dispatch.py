"""Which form of an operation runs: the best that can, or the one asked for by name.

Knows: the forms of each operation, best first for each platform. Knows nothing of the model.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

from pallas_kernels.kv_write import reference as kv_write_reference
from pallas_kernels.kv_write import xla as kv_write_xla
from pallas_kernels.paged_attention import reference as paged_attention_reference
from pallas_kernels.paged_attention import xla as paged_attention_xla

Operation = Literal["paged_attention", "kv_write"]
Form = Callable[..., Any]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One form of an operation and the platforms it is offered on by default."""

    name: str
    form: Form
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")


FORMS: dict[Operation, tuple[Entry, ...]] = {
    "paged_attention": (
        Entry("xla", paged_attention_xla.paged_attention),
        Entry("reference", paged_attention_reference.paged_attention),
    ),
    "kv_write": (
        Entry("xla", kv_write_xla.kv_write),
        Entry("reference", kv_write_reference.kv_write),
    ),
}
"""Best first. The reference comes last in every list: it runs everywhere, so the default always works."""


@dataclass(frozen=True)
class Choice:
    """What `choose` settled on; call it like the operation's reference. Hashable, so jit may take it as static."""

    operation: Operation
    entries: tuple[Entry, ...]
    why: str

    @property
    def name(self) -> str:
        """The form that is tried first."""
        return self.entries[0].name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first form that can do this call.

        Raises NotImplementedError only where no form is left, which is where one was asked for by name.
        """
        for entry in self.entries[:-1]:
            try:
                return entry.form(*args, **kwargs)
            except NotImplementedError as refusal:
                _log.info("%s: %s cannot do this here (%s); trying the next", self.operation, entry.name, refusal)
        return self.entries[-1].form(*args, **kwargs)


def choose(operation: Operation, name: str | None = None, platform: str | None = None) -> Choice:
    """The form of `operation` to run on `platform` (default: JAX's own), and why; logged once here.

    Without `name`, the platform's best first, each later form standing in where an earlier one raises
    NotImplementedError. With `name`, that form alone. Raises ValueError for a name that does not exist.
    """
    platform = platform or jax.default_backend()
    if name is None:
        entries = tuple(entry for entry in FORMS[operation] if platform in entry.platforms)
        why = f"the first of {[entry.name for entry in entries]} offered on {platform}"
    else:
        entries = tuple(entry for entry in FORMS[operation] if entry.name == name)
        why = "asked for by name"
    if not entries:
        names = [entry.name for entry in FORMS[operation]]
        raise ValueError(f"{operation} has no form {name!r}; expected one of {names}, or None for the default")
    choice = Choice(operation, entries, why)
    _log.info("%s on %s: %s, %s", operation, platform, choice.name, why)
    return choice
