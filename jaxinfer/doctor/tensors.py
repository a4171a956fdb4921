"""A checkpoint's tensors, looked at one by one: are they finite, of a sane scale, and alive?

Knows: what a damaged or badly converted tensor looks like. Knows no file format, no family and nothing of JAX: a tensor
is a name and a shape that can be read some rows at a time.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from jaxtyping import Float32

from jaxinfer.checkpoint.tensors import Tensors, pieces

FAR = 30.0
"""How many times a tensor's scale may differ from its peers' and from its kind's. In SmolLM2 135M and Gemma 3 270M the
most is 4 for a matrix and 10 for a norm; a tensor a hundred times too large is seen."""
MOSTLY_ZERO = 0.9
SHORT_ROW = 8
NAMED_ROWS = 4


@dataclass(frozen=True, slots=True)
class TensorStats:
    """What was found in one tensor.

    broken: entries that are NaN or infinite; the other figures are those of the finite ones. absmax: the largest
    magnitude. rms: root of the mean square. zeros: the share of entries that are 0. constant_rows: rows of a matrix, of
    SHORT_ROW entries or more, that hold one number over and over; the last two axes make the matrix.
    """

    name: str
    shape: tuple[int, ...]
    broken: int
    absmax: float
    rms: float
    zeros: float
    constant_rows: tuple[int, ...]

    @property
    def kind(self) -> str:
        """matrix, norm or other: what its scale can be compared with. Of biases and sinks any scale is usual."""
        if self.name.endswith("bias") or "sinks" in self.name:
            return "other"
        if len(self.shape) > 1:
            return "matrix"
        return "norm" if "norm" in self.name else "other"

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def scale(self) -> float:
        """Of a matrix, what it does to the size of a vector of independent entries; else the rms."""
        return self.rms * math.sqrt(self.shape[-1]) if self.kind == "matrix" else self.rms

    @property
    def role(self) -> str:
        """The name without its numbers: the same in every layer, and for every expert."""
        return re.sub(r"\d+", "*", self.name)


def inspect(tensors: Tensors, name: str) -> TensorStats:
    """Figures of the tensor `name`; a piece of it at a time is in memory."""
    shape = tensors.shapes[name]
    size, broken, absmax, square, zeros, row = 0, 0, 0.0, 0.0, 0, 0
    constant: list[int] = []
    for values in _blocks(tensors, name, shape):
        finite = np.isfinite(values)
        kept = np.where(finite, values, 0)
        size, broken = size + values.size, broken + values.size - int(finite.sum())
        zeros += int((values == 0).sum())
        absmax = max(absmax, float(np.abs(kept).max(initial=0)))
        square += float(np.square(kept, dtype=np.float64).sum())
        if len(shape) > 1 and shape[-1] >= SHORT_ROW:
            rows = values.reshape(-1, shape[-1])
            constant += (row + np.flatnonzero((rows == rows[:, :1]).all(axis=1))).tolist()
            row += len(rows)
    rms = math.sqrt(square / max(1, size - broken))
    return TensorStats(name, shape, broken, absmax, rms, zeros / max(1, size), tuple(constant))


def _blocks(tensors: Tensors, name: str, shape: tuple[int, ...]) -> Iterator[Float32[np.ndarray, "..."]]:
    for start, stop in pieces(shape):
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow shows as an entry that is not finite
            yield np.asarray(tensors.read(name, start, stop), np.float32)


def suspicions(found: Sequence[TensorStats], vocabulary: int) -> list[tuple[str, str]]:
    """What looks wrong, as (tensor, why). `vocabulary`: rows from there on pad a table of words and may be anything."""
    return [(stats.name, why) for stats in found for why in _own_faults(stats, vocabulary)] + _far_from_peers(found)


def _own_faults(stats: TensorStats, vocabulary: int) -> Iterator[str]:
    if stats.broken:
        yield f"{stats.broken} of {stats.size} numbers are NaN or infinite"
    if stats.kind != "other" and stats.zeros > MOSTLY_ZERO:
        yield f"{stats.zeros:.0%} of its numbers are 0"
        return
    rows = [row for row in stats.constant_rows if not _is_padding(stats, row, vocabulary)]
    if rows:
        more = f" and {len(rows) - NAMED_ROWS} more" if len(rows) > NAMED_ROWS else ""
        yield f"row {', '.join(map(str, rows[:NAMED_ROWS]))}{more} holds one number over and over"


def _is_padding(stats: TensorStats, row: int, vocabulary: int) -> bool:
    return row >= vocabulary and re.search(r"embd|embed|head|^output\.", stats.name) is not None


def _far_from_peers(found: Sequence[TensorStats]) -> list[tuple[str, str]]:
    """Matrices and norms whose scale is far from that of the same tensor in other layers and from all of their kind."""
    living = [stats for stats in found if stats.kind != "other" and stats.scale > 0]
    usual = {kind: median(s.scale for s in living if s.kind == kind) for kind in {s.kind for s in living}}
    scales: dict[str, list[float]] = {}
    for stats in living:
        scales.setdefault(stats.role, []).append(stats.scale)
    faults = []
    for stats in living:
        others = list(scales[stats.role])
        others.remove(stats.scale)
        peers = median(others) if others else usual[stats.kind]
        ratio = stats.scale / peers
        if _far(ratio) and _far(stats.scale / usual[stats.kind]):
            faults.append((stats.name, f"its scale is {ratio:.3g} times that of its peers (rms {stats.rms:.3g})"))
    return faults


def _far(ratio: float) -> bool:
    return not 1 / FAR <= ratio <= FAR
