"""One array per call: what a plan's rows say, packed on the host and unpacked inside the step.

Knows: the columns of a packed row. A call hands one int32 array to the device (floats as their bits), for each array
costs a transfer. The arrays are made anew for every call and never written again: JAX on CPU reads numpy's own memory,
perhaps after `dispatch` has returned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32
from numpy.typing import NDArray

from jaxinfer.arrays import Lengths, PageTable, Positions, RowBool, RowInt, Slots, Tokens
from jaxinfer.engine.sampling import SampleRows
from jaxinfer.plan import DecodeRow, PrefillChunk, RowParams
from jaxinfer.request import MAX_STOP_IDS

INTS = ("slot", "start", "count", "samples", "greedy", "top_k", "history", "ban_stops", "logprobs", "choice")
SEED = ("seed_high", "seed_low")
FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
SCALARS = {name: column for column, name in enumerate((*INTS, *SEED, *FLOATS))}
FIRST_FLOAT = len(INTS) + len(SEED)

Rows = Int32[Array, "s columns"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns of a packed row: scalars, stop ids, `tokens` ids, `pages` page numbers. Static in every step.

    `tokens` is 0 in a decode step, which takes its ids from the state. slots and vocab mark what is not there.
    """

    tokens: int
    pages: int
    slots: int
    vocab: int

    @property
    def stops(self) -> slice:
        """The stop ids' columns."""
        return slice(len(SCALARS), len(SCALARS) + MAX_STOP_IDS)

    @property
    def ids(self) -> slice:
        """The prompt tokens' columns."""
        return slice(self.stops.stop, self.stops.stop + self.tokens)

    @property
    def table(self) -> slice:
        """The page table's columns."""
        return slice(self.ids.stop, self.ids.stop + self.pages)

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.table.stop


# ---- host ------------------------------------------------------------------------------------------------------------


def padding(layout: Layout, rows: int) -> NDArray[np.int32]:
    """Rows that write nothing and that nobody reads: no tokens, nothing sampled, greedy."""
    packed = np.zeros((rows, layout.width), np.int32)
    packed[:, SCALARS["greedy"]] = 1
    packed[:, layout.stops] = layout.vocab
    return packed


def _pack_row(
    row: NDArray[np.int32], layout: Layout, *, slot: int, start: int, count: int, samples: bool, pages: Sequence[int]
) -> None:
    row[: SCALARS["greedy"]] = (slot, start, count, samples)
    row[layout.table.start : layout.table.start + len(pages)] = pages


def _pack_params(row: NDArray[np.int32], layout: Layout, how: RowParams) -> None:
    params = how.params
    row[SCALARS["greedy"] : len(INTS)] = (
        params.greedy,
        params.top_k,
        params.needs_history,
        how.ban_stops,
        params.logprobs is not None,
        how.choice,
    )
    row[len(INTS) : FIRST_FLOAT] = np.array((how.seed >> 32, how.seed & 0xFFFFFFFF), np.uint32).view(np.int32)
    row[FIRST_FLOAT : len(SCALARS)].view(np.float32)[:] = (
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    row[layout.stops][: len(how.stop_ids)] = sorted(how.stop_ids)


def pack_prefill(chunk: PrefillChunk, layout: Layout) -> NDArray[np.int32]:
    """One row [1, width]; the chunk must fit `layout.tokens`."""
    packed = padding(layout, 1)
    count = len(chunk.tokens)
    _pack_row(
        packed[0], layout, slot=chunk.slot, start=chunk.start, count=count, samples=chunk.samples, pages=chunk.pages
    )
    packed[0, layout.ids][:count] = chunk.tokens
    if chunk.samples:
        _pack_params(packed[0], layout, chunk.row)
    return packed


def pack_decodes(rows: Sequence[DecodeRow], layout: Layout, bucket: int) -> NDArray[np.int32]:
    """[bucket, width]: the rows in order, then padding."""
    packed = padding(layout, bucket)
    for row, decode in zip(packed, rows, strict=False):
        _pack_row(row, layout, slot=decode.slot, start=decode.position, count=1, samples=True, pages=decode.pages)
        _pack_params(row, layout, decode.row)
    return packed


# ---- device ----------------------------------------------------------------------------------------------------------


class StepRows(NamedTuple):
    """A packed array, taken apart. `slots` is m where nothing is sampled, so that nothing is recorded there."""

    slots: Slots
    tokens: Tokens
    positions: Positions
    page_table: PageTable
    lengths: Lengths
    valid: RowInt
    """Tokens of the row that are no padding."""
    samples: RowBool
    how: SampleRows


def unpack(packed: Rows, layout: Layout) -> StepRows:
    """What a step computes on; a row covers positions start .. start + count - 1, the rest of `t` is -1."""
    ints = {name: packed[:, column] for name, column in SCALARS.items() if name not in FLOATS}
    floats = {name: lax.bitcast_convert_type(packed[:, SCALARS[name]], jnp.float32) for name in FLOATS}
    flags = {name: ints[name] != 0 for name in ("samples", "greedy", "history", "ban_stops", "logprobs")}
    start, count, samples = ints["start"], ints["count"], flags.pop("samples")
    offsets = jnp.arange(max(layout.tokens, 1), dtype=jnp.int32)
    how = SampleRows(
        **floats,
        **flags,
        top_k=ints["top_k"],
        choice=ints["choice"],
        stop_ids=packed[:, layout.stops],
        seed=lax.bitcast_convert_type(jnp.stack([ints[name] for name in SEED], axis=1), jnp.uint32),
        position=start + count,
    )
    return StepRows(
        slots=jnp.where(samples, ints["slot"], layout.slots),
        tokens=packed[:, layout.ids],
        positions=jnp.where(offsets < count[:, None], start[:, None] + offsets, -1),
        page_table=packed[:, layout.table],
        lengths=jnp.where(count > 0, start + count, 0),
        valid=count,
        samples=samples,
        how=how,
    )
