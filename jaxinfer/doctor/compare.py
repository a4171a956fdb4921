"""Two runs of one model, part by part: where they first differ, and which tensor is to blame.

Knows: the order of the parts and which of our parameters each one multiplies by. Knows no implementation: a run is
arrays by the part's name, and weights are tensors by a Hugging Face name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxinfer.checkpoint.fill import build, flatten
from jaxinfer.config import ModelConfig
from jaxinfer.doctor.forward import EMBEDDING, FINAL, LOGITS, Activations
from jaxinfer.errors import CheckpointError
from jaxinfer.model.families import Leaf, family_of, leaf_of
from jaxinfer.model.quantised import is_quantised

TOLERANCE = 1e-3
ROUNDING = 1e-6
"""Two loaded tensors are the same up to this share of the largest entry."""

_WITHIN = (
    *("attention_norm", "mlp_norm", "query", "q_down", "kv_down", "qkv", "qkv_bias", "q_norm", "kv_norm", "k_norm"),
    *("q_up", "key_up", "value_up", "sinks", "router", "router_bias", "selection_bias", "gate_up", "gate_up_bias"),
    *("down", "down_bias", "out", "out_bias", "attention_post_norm", "mlp_post_norm"),
)
"""Leaves in the order in which a part uses them."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One part: the largest difference between the runs, beside the largest magnitude in the reference's."""

    part: str
    difference: float
    magnitude: float

    @property
    def share(self) -> float:
        """The difference as a share of the magnitude; infinite where a run is not finite."""
        if not np.isfinite(self.difference):
            return float("inf")
        return self.difference / self.magnitude if self.magnitude else float(self.difference > 0)


@dataclass(frozen=True)
class Reference:
    """Another implementation's run, and the weights it holds, by their Hugging Face names."""

    activations: Activations
    weights: Mapping[str, np.ndarray]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """As `checkpoint.tensors.Tensors` wants it."""
        return {name: value.shape for name, value in self.weights.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """As `checkpoint.tensors.Tensors` wants it."""
        return self.weights[name][start:stop]


def differences(ours: Activations, theirs: Activations) -> list[Difference]:
    """Every part of `ours`, in its order. Raises CheckpointError where `theirs` lacks one, or has another shape."""
    found = []
    for part, mine in ours.items():
        other = theirs.get(part)
        if other is None or other.shape != mine.shape:
            has = "lacks it" if other is None else f"has shape {other.shape}"
            raise CheckpointError(f"{part} has shape {mine.shape}, and the reference {has}; is it the same model?")
        difference = np.abs(mine.astype(np.float64) - other).max()
        found.append(Difference(part, float(difference), float(np.abs(other).max())))
    return found


def first_divergence(found: Sequence[Difference], tolerance: float = TOLERANCE) -> Difference | None:
    """The first part that differs by more than `tolerance` of its magnitude."""
    return next((row for row in found if not row.share <= tolerance), None)


def diverging_tensors(config: ModelConfig, params: Any, part: str, reference: Reference) -> list[str]:
    """The tensors of `part` that we hold otherwise than the reference does, in the order in which they are used.

    A tensor that the reference holds under no such name is told as that. Empty: the weights are the same, so the
    arithmetic, or the configuration, is what differs.
    """
    naming, found = family_of(config.family).hf.naming, []
    for path, mine in _leaves_of(part, params):
        leaf = leaf_of(config, naming, path, mine.shape)
        missing = [source.name for source in leaf.sources if source.name not in reference.weights]
        if missing:
            found += [f"{missing[0]} (the reference has none of that name to compare with)"]
            continue
        theirs = build(reference, leaf, np.dtype(np.float32))
        same = np.abs(np.asarray(plain(mine), np.float32) - theirs) <= ROUNDING * np.abs(theirs).max(initial=0)
        found += [leaf.sources[i].name for i in np.unique(_owners(leaf)[~same])]  # NaN is never the same
    return list(dict.fromkeys(found))


def plain(leaf: Any) -> np.ndarray:
    """A leaf of our tree as one array, whatever it is kept in."""
    return np.asarray(leaf.dequantise() if is_quantised(leaf) else leaf)


def _leaves_of(part: str, params: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The parameters that `part` is made with, in the order of use."""
    leaves = flatten(params)
    pattern = _pattern(part)
    chosen = [path for path in leaves if re.fullmatch(pattern, "/".join(path))]
    if part == LOGITS and len(chosen) > 1:
        chosen = [path for path in chosen if path == ("head",)]
    for path in sorted(chosen, key=lambda path: _WITHIN.index(path[-1]) if path[-1] in _WITHIN else -1):
        yield path, leaves[path]


def _pattern(part: str) -> str:
    fixed = {EMBEDDING: "embedding", FINAL: "final_norm", LOGITS: "head|embedding"}
    if part in fixed:
        return fixed[part]
    _, layer, what = part.split(" ", 2)
    inner = {
        "attention output": "attention_norm|attention/.*",
        "MLP output": "attention_post_norm|mlp_norm|mlp/.*|experts/.*",
        "output": "mlp_post_norm",
    }
    return f"block_{layer}/({inner[what]})"


class _Numbered:
    """Tensors whose every entry is the number of the source that asks for it."""

    def __init__(self, leaf: Leaf) -> None:
        self.shapes = {source.name: source.shape for source in leaf.sources}
        self._numbers = {source.name: float(number) for number, source in enumerate(leaf.sources)}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.full(self.shapes[name], self._numbers[name], np.float32)[start:stop]


def _owners(leaf: Leaf) -> np.ndarray:
    """Which of the leaf's sources each of its entries comes from."""
    return build(_Numbered(leaf), replace(leaf, offset=0.0), np.dtype(np.float32)).astype(np.int32)
