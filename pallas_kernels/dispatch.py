"""Which form of an operation runs: the best that can, or the one asked for by name.

Knows: the forms of each operation, best first for each platform. Knows nothing of the model.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

import jax

from pallas_kernels.kv_write import reference as kv_write_reference
from pallas_kernels.kv_write import xla as kv_write_xla
from pallas_kernels.paged_decode_attention import reference as decode_reference
from pallas_kernels.paged_decode_attention import xla as decode_xla
from pallas_kernels.paged_prefill_attention import reference as prefill_reference
from pallas_kernels.paged_prefill_attention import xla as prefill_xla
from pallas_kernels.quant_matmul import reference as quant_matmul_reference
from pallas_kernels.quant_matmul import xla as quant_matmul_xla
from pallas_kernels.quant_matmul import xla_cpu as quant_matmul_xla_cpu

Operation = Literal["paged_decode_attention", "paged_prefill_attention", "kv_write", "quant_matmul"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
Form = Callable[..., Any]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One form of an operation and the platforms it is offered on by default."""

    name: str
    form: Form
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")


FORMS: dict[Operation, tuple[Entry, ...]] = {
    "paged_decode_attention": (
        Entry("xla", decode_xla.paged_decode_attention),
        Entry("reference", decode_reference.paged_decode_attention),
    ),
    "paged_prefill_attention": (
        Entry("xla", prefill_xla.paged_prefill_attention),
        Entry("reference", prefill_reference.paged_prefill_attention),
    ),
    "kv_write": (
        Entry("xla", kv_write_xla.kv_write),
        Entry("reference", kv_write_reference.kv_write),
    ),
    "quant_matmul": (
        Entry("xla_cpu", quant_matmul_xla_cpu.quant_matmul, ("cpu",)),
        Entry("xla", quant_matmul_xla.quant_matmul, ("gpu", "tpu")),
        Entry("reference", quant_matmul_reference.quant_matmul),
    ),
}
"""Best first. The reference comes last in every list: it runs everywhere, so the default always works."""


@dataclass(frozen=True)
class Choice:
    """What `choose` settled on; call it like the operation's reference. Hashable, so jit may take it as static.

    ran: what came of the calls so far: each form that ran, with the reasons for which better ones refused.
    """

    operation: Operation
    entries: tuple[Entry, ...]
    why: str
    ran: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """The form that is tried first."""
        return self.entries[0].name

    @property
    def report(self) -> tuple[tuple[str, str], ...]:
        """Form and reason of all that ran; before anything ran, of what is tried first."""
        return tuple(self.ran.items()) or ((self.name, self.why),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first form that can do this call.

        Raises NotImplementedError only where no form is left, which is where one was asked for by name.
        """
        refusals: list[str] = []
        for entry in self.entries[:-1]:
            try:
                return self._note(entry, refusals, entry.form(*args, **kwargs))
            except NotImplementedError as refusal:
                refusals.append(f"{entry.name} cannot: {refusal}")
        return self._note(self.entries[-1], refusals, self.entries[-1].form(*args, **kwargs))

    def _note(self, entry: Entry, refusals: list[str], result: Any) -> Any:
        why = "; ".join(refusals) or self.why
        if self.ran.get(entry.name) != why:
            self.ran[entry.name] = why
            _log.info("%s: %s, %s", self.operation, entry.name, why)
        return result


def choose(operation: Operation, name: str | None = None, platform: str | None = None) -> Choice:
    """The form of `operation` to run on `platform` (default: JAX's own), and why.

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
    return _choice(operation, entries, why)


@cache
def _choice(operation: Operation, entries: tuple[Entry, ...], why: str) -> Choice:
    """Equal choices are one: jit traces a step once for all of them, and what was seen then is known to each."""
    return Choice(operation, entries, why)
