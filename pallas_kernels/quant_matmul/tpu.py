"""Products with quantised weights on a TPU: whole numbers stream from HBM and are widened on their way to the MXU.

Knows: int8 and int4 are exact in bfloat16, so weights are widened but never scaled; scales meet the sums, of which
there are far fewer. The sums of each group come out of one product: of a piece of x with eight groups there are eight
copies, each zero but in one group, and the MXU takes all of them against the weights that it holds anyway. Offsets meet
the sums of x over each group, a product 1 / group as large. x in float32 is three rows of bfloat16 that add up to it.

All inputs of a block of outputs are in VMEM at once, so that no sum is put aside. docs/notes/014 has the costs.
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Float32

from pallas_kernels import tpu_chip
from pallas_kernels.quant_matmul.arrays import Numbers, Offset, Product, Rows, Scale, group_of

MOST_ROWS = 64
"""Rows of x up to which this form is taken. By channel XLA is as fast at any number; in groups the eight copies cost
the MXU more from some 200 rows on than XLA's decoding of the weight."""
GROUPS = (16, 32, 64, 128)
"""Sizes of a group of which eight, a piece, fill whole registers of 128 lanes."""
_AT_ONCE = 8
"""Groups whose sums come out of one product: as many rows as a register of float32 has."""
_UNROLLED = 8
"""Most pieces of a loop's turn: only within a turn does the compiler fill one piece's waiting with another's work.
Twice as many save a tenth of the bundles and double the time to compile."""
_MOST_OUTPUTS = 1_024
_VALUES = 2 * 2**20
"""Bytes of a block of values: its copy takes some 1,300 cycles at least, far longer than a grid step's own 100."""
_SUMS = 2 * 2**20
"""Bytes of the sums that come out of one product."""
_WIDENED = 2**20
"""Most numbers of a product by channel: v4 widens them by way of float32, and keeps them all."""
_ROOM = 12 * 2**20
"""Bytes of VMEM to take: v4 has 16 MiB."""
_LANES = 128
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


@partial(jax.jit, static_argnames=("dtype", "interpret"))
def quant_matmul(
    x: Rows, values: Numbers, scale: Scale, offset: Offset | None, *, dtype: Any, interpret: Any = False
) -> Product:
    """As the reference.

    interpret: handed to `pallas_call`. Jitted, so that a model of many layers traces it once. Raises ValueError where
    the groups do not divide i, NotImplementedError for more than MOST_ROWS rows, for several groups of a size that is
    not one of GROUPS, where x and 128 outputs' weights do not fit into VMEM, and on v4.
    """
    tpu_chip.refuse_v4("plain XLA multiplies quantised weights two to three times as fast there")
    group, groups = group_of(values, scale), scale.shape[1]
    if len(x) > MOST_ROWS:
        raise NotImplementedError(f"{len(x)} rows; XLA is as fast or faster from {MOST_ROWS + 1} on")
    if groups > 1 and group not in GROUPS:
        raise NotImplementedError(f"groups of {group} inputs; expected one group, or groups of one of {GROUPS}")
    if groups == 1 and offset is not None:
        product = quant_matmul(x, values, scale, None, dtype=jnp.float32, interpret=interpret)
        sums = x.astype(jnp.float32).sum(axis=1, keepdims=True)
        return (product + sums * offset[:, 0].astype(jnp.float32)).astype(dtype)
    pieces = _in_bfloat16(x)
    rows = -(-len(x) // 8) * 8  # whole registers, so that the copies lie one below another
    stacked = jnp.pad(pieces, ((0, 0), (0, rows - len(x)), (0, 0))).reshape(-1, x.shape[1])
    call = _by_channel if groups == 1 else partial(_in_groups, offset=offset)
    exact = len(pieces) > 1 or dtype not in tpu_chip.DTYPES
    out = call(stacked, values, scale, dtype=jnp.float32 if exact else dtype, interpret=interpret)
    return out.reshape(len(pieces), rows, -1)[:, : len(x)].sum(axis=0).astype(dtype)


def _in_bfloat16(x: Float[Array, "n i"]) -> BFloat16[Array, "pieces n i"]:
    """Numbers of bfloat16 that add up to x: x itself, or of float32 three, each the rest of those before it.

    Rounded by `reduce_precision`, since XLA may take a cast to bfloat16 and back for nothing.
    """
    if x.dtype == jnp.bfloat16:
        return x[None]
    pieces, rest = [], x.astype(jnp.float32)
    for _ in range(3):
        pieces.append(jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
        rest = rest - pieces[-1]
    return jnp.stack(pieces).astype(jnp.bfloat16)


def _loadable(x: Float[Array, "o g"]) -> Float[Array, "o g"]:
    """What a kernel can load: x, or float16 as float32, which XLA makes of it."""
    return x if x.dtype in tpu_chip.DTYPES else x.astype(jnp.float32)


class _Blocks(NamedTuple):
    """How a weight is cut: `outputs` at a time, with all of their inputs."""

    outputs: int
    inputs: int
    groups: int

    def spec(self, columns: int) -> pl.BlockSpec:
        """Of an array with a row for each output."""
        return pl.BlockSpec((self.outputs, columns), lambda block: (block, 0))

    def lying(self, rows: int) -> pl.BlockSpec:
        """Of an array with a column for each output."""
        return pl.BlockSpec((rows, self.outputs), lambda block: (0, block))


def _whole(rows: int, columns: int) -> pl.BlockSpec:
    """Of an array that every block meets: it stays in VMEM, once."""
    return pl.BlockSpec((rows, columns), lambda block: (0, 0), pipeline_mode=pl.Buffered(1))


def _blocks(rows: int, values: Numbers, groups: int) -> _Blocks:
    """As many outputs as make a block of values of the size that is wanted, in whole registers of 128."""
    outputs, inputs = values.shape
    size = inputs if values.dtype == jnp.int8 else -(-inputs // 2)
    each = 2 * size + 2 * 4 * rows + (20 * -(-groups // _LANES) * _LANES if groups > 1 else 0)
    left = _ROOM - 2 * rows * inputs - _SUMS
    wanted = min(_VALUES // size, _SUMS // (4 * _AT_ONCE * rows), left // each, _MOST_OUTPUTS, outputs)
    if left < _LANES * each:
        raise NotImplementedError(f"{inputs} inputs of {rows} rows and {_LANES} outputs do not fit into VMEM")
    return _Blocks(max(_LANES, wanted // _LANES * _LANES), inputs, groups)


def _by_channel(x: Rows, values: Numbers, scale: Scale, *, dtype: Any, interpret: Any) -> Product:
    blocks = _blocks(len(x), values, 1)
    specs = [_whole(*x.shape), blocks.spec(blocks.inputs), blocks.lying(1)]
    args = (x, values, scale.astype(jnp.float32).reshape(1, -1))
    return _call(_kernel_by_channel, blocks, args, specs, [], dtype, interpret)


def _kernel_by_channel(x: Any, values: Any, scale: Any, out: Any) -> None:
    size = _piece(*values.shape)

    def add(piece: Any, total: Any) -> Any:
        at = pl.ds(pl.multiple_of(piece * size, size), size)
        return total + _dot(x[:, at], values[:, at].astype(jnp.bfloat16))

    total = jax.lax.fori_loop(0, values.shape[1] // size, add, jnp.zeros(out.shape, jnp.float32))
    out[...] = (total * scale[...]).astype(out.dtype)


def _piece(outputs: int, inputs: int) -> int:
    """Inputs of one product by channel: whole registers that divide them, all where there are none."""
    registers, left = divmod(inputs, _LANES)
    most = _WIDENED // outputs // _LANES
    return inputs if left else max(n for n in range(1, min(most, registers) + 1) if registers % n == 0) * _LANES


def _in_groups(x: Rows, values: Numbers, scale: Scale, *, offset: Offset | None, dtype: Any, interpret: Any) -> Product:
    blocks = _blocks(len(x), values, scale.shape[1])
    args: tuple[Any, ...] = (x, values, _loadable(scale))
    specs = [_whole(*x.shape), blocks.spec(blocks.inputs), blocks.spec(blocks.groups)]
    if offset is not None:
        sums = x.astype(jnp.float32).reshape(len(x), blocks.groups, -1).sum(axis=-1)
        if offset.dtype == jnp.bfloat16:
            sums = _in_bfloat16(sums).reshape(-1, blocks.groups)
        args += (_loadable(offset), sums)
        specs += [blocks.spec(blocks.groups), _whole(*sums.shape)]
    scratch = [pltpu.VMEM((blocks.groups, blocks.outputs), jnp.float32)]
    return _call(_kernel_in_groups, blocks, args, specs, scratch, dtype, interpret)


def _call(
    kernel: Any,
    blocks: _Blocks,
    args: tuple[Any, ...],
    specs: list[Any],
    scratch: list[Any],
    dtype: Any,
    interpret: Any,
) -> Product:
    rows, outputs = len(args[0]), len(args[1])
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, outputs), dtype),
        grid=(pl.cdiv(outputs, blocks.outputs),),
        in_specs=specs,
        out_specs=blocks.lying(rows),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="quant_matmul",
    )
    return call(*args)


def _kernel_in_groups(x: Any, values: Any, scale: Any, *rest: Any) -> None:
    """rest: offsets and what they meet, if there are any; the result; scales with a row for each group."""
    *offsets, out, turned = rest
    turned[...] = _turn(scale[...])
    rows, inputs = x.shape
    group = inputs // turned.shape[0]
    size = _AT_ONCE * group
    pieces, left = divmod(inputs, size)

    def add(piece: Any, total: Any) -> Any:
        start = pl.multiple_of(piece * size, size)
        scales = turned[pl.ds(pl.multiple_of(piece * _AT_ONCE, _AT_ONCE), _AT_ONCE)]
        return total + _sums(x[:, pl.ds(start, size)], values[:, pl.ds(start, size)], scales)

    total = jnp.zeros((rows, values.shape[0]), jnp.float32)
    unroll = max(n for n in range(1, _UNROLLED + 1) if pieces % n == 0)
    total = jax.lax.fori_loop(0, pieces, add, total, unroll=unroll)
    if left:
        total += _sums(x[:, pieces * size :], values[:, pieces * size :], turned[pieces * _AT_ONCE :])
    if offsets:
        offset, sums = offsets
        total += _met(offset, sums, rows)
    out[...] = total.astype(out.dtype)


def _sums(x: Any, values: Any, scales: Float32[Array, "g o"]) -> Float32[Array, "n o"]:
    """The product of a piece: x [n, i], values [o, i], of a few groups."""
    (rows, size), groups = x.shape, len(scales)
    group_of_lane = jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, (rows, size), 1), size // groups)
    wide = x.astype(jnp.float32)  # whose registers have eight rows: copies of any number of eights lie without gaps
    copies = [jnp.where(group_of_lane == group, wide, 0) for group in range(groups)]
    apart = _dot(jnp.concatenate(copies).astype(jnp.bfloat16), values.astype(jnp.bfloat16))
    scaled = [apart[rows * group : rows * (group + 1)] * scales[group : group + 1] for group in range(groups)]
    return reduce(jnp.add, scaled)


def _met(offset: Any, sums: Any, rows: int) -> Float32[Array, "n o"]:
    """What offsets [o, g] add: sums of x [n, g], or three times as many rows of bfloat16 that add up to them."""
    if offset.dtype != jnp.bfloat16:
        return _dot(sums[...], offset[...].astype(jnp.float32), jax.lax.Precision.HIGHEST)
    pieces = _dot(sums[...], offset[...])
    return pieces[:rows] + pieces[rows : 2 * rows] + pieces[2 * rows :]


def _turn(scale: Scale) -> Float32[Array, "g o"]:
    """Scales [o, g] the other way round: by a product with 1, which is exact and takes any shape."""
    size = (scale.shape[1], scale.shape[1])
    one = jax.lax.broadcasted_iota(jnp.int32, size, 0) == jax.lax.broadcasted_iota(jnp.int32, size, 1)
    if scale.dtype == jnp.bfloat16:
        return _dot(one.astype(jnp.bfloat16), scale)
    return _dot(one.astype(jnp.float32), scale.astype(jnp.float32), jax.lax.Precision.HIGHEST)


def _dot(a: Any, b: Any, precision: Any = None) -> Float32[Array, "n o"]:
    return jax.lax.dot_general(a, b, _CONTRACT_LAST, precision=precision, preferred_element_type=jnp.float32)
