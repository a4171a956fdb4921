"""Which form of an operation runs: the best that can, or the one asked for by name.

Knows: the forms of each operation, best first for each platform. Knows nothing of the model, and keeps no record of
what ran: whoever calls is told.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args

import jax

Operation = Literal["paged_decode_attention", "paged_prefill_attention", "kv_write", "quant_matmul"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
Form = Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """One form of an operation, the platforms it is offered on by default, and why it is on no others, if that is odd.

    only: the one platform that compiles it, if there is but one.

    form: what runs; None for the function that is called like the operation, in the module of its folder that is called
    like the form. It is imported when it first runs: Pallas for an accelerator that is not there costs time and brings
    nothing.
    """

    name: str
    form: Form | None = None
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    held_back: str = ""
    only: str | None = None

    def load(self, operation: str) -> Form:
        """The function that runs."""
        return self.form or getattr(import_module(f"pallas_kernels.{operation}.{self.name}"), operation)


_TPU = Entry("tpu", platforms=("tpu",), only="tpu")
_GPU = Entry(
    "gpu",
    platforms=(),
    held_back="gpu was interpreted and compiled, and has not run on one: ask for it by name",
    only="gpu",
)
_XLA, _REFERENCE = Entry("xla"), Entry("reference")

FORMS: dict[Operation, tuple[Entry, ...]] = {
    "paged_decode_attention": (_TPU, _GPU, _XLA, _REFERENCE),
    "paged_prefill_attention": (_TPU, _GPU, _XLA, _REFERENCE),
    "kv_write": (_TPU, _GPU, _XLA, _REFERENCE),
    "quant_matmul": (
        _TPU,
        _GPU,
        Entry("xla_cpu", platforms=("cpu",)),
        Entry("xla", platforms=("gpu", "tpu")),
        _REFERENCE,
    ),
}
"""Best first. The reference comes last in every list: it runs everywhere, so the default always works."""


class Attempt(NamedTuple):
    """What came of a call: the form that ran, why it and no better one did, and what it returned."""

    form: str
    why: str
    result: Any


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
        """The result of `attempt`."""
        return self.attempt(*args, **kwargs).result

    def attempt(self, *args: Any, **kwargs: Any) -> Attempt:
        """Run the first form that can do this call.

        Raises NotImplementedError only where no form is left, which is where one was asked for by name.
        """
        refusals: list[str] = []
        for entry in self.entries[:-1]:
            try:
                return self._run(entry, refusals, *args, **kwargs)
            except NotImplementedError as refusal:
                refusals.append(f"{entry.name} cannot: {refusal}")
        return self._run(self.entries[-1], refusals, *args, **kwargs)

    def _run(self, entry: Entry, refusals: list[str], *args: Any, **kwargs: Any) -> Attempt:
        result = entry.load(self.operation)(*args, **kwargs)
        return Attempt(entry.name, "; ".join(refusals) or self.why, result)


def choose(operation: Operation, name: str | None = None, platform: str | None = None) -> Choice:
    """The form of `operation` to run on `platform` (default: JAX's own), and why.

    Without `name`, the platform's best first, each later form standing in where an earlier one raises
    NotImplementedError. With `name`, that form alone. Raises ValueError for a name that does not exist.
    """
    platform = platform or jax.default_backend()
    if name is None:
        entries = tuple(entry for entry in FORMS[operation] if platform in entry.platforms)
        held = {entry.held_back for entry in FORMS[operation] if entry.held_back and platform == entry.name}
        why = "; ".join((f"the first of {[entry.name for entry in entries]} offered on {platform}", *held))
    else:
        entries = tuple(entry for entry in FORMS[operation] if entry.name == name)
        why = "asked for by name"
    if not entries:
        names = [entry.name for entry in FORMS[operation]]
        raise ValueError(f"{operation} has no form {name!r}; expected one of {names}, or none for the default")
    return Choice(operation, entries, why)


def check(names: Mapping[str, str], platform: str | None = None) -> None:
    """Raises ValueError for a pair of an operation and a form that does not exist, or that `platform`, if it is given,
    cannot compile: only an interpreter would run it there.
    """
    for operation, name in names.items():
        if operation not in FORMS:
            raise ValueError(f"no operation {operation!r}; expected one of {', '.join(OPERATIONS)}")
        only = choose(operation, name).entries[0].only
        if platform and only not in (None, platform):
            here = [entry.name for entry in FORMS[operation] if entry.only in (None, platform)]
            raise ValueError(f"{operation}={name} runs on {only}, and this is {platform}; expected one of {here}")
