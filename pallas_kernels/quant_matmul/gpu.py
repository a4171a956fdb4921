"""Products with quantised weights on Hopper's tensor cores (Mosaic GPU): the weight is decoded on its way to them.

A program owns `OUTPUTS` outputs, some rows of x and a share of the inputs. Numbers and x come by TMA into a ring of
shared memory; a tile of numbers passes through registers, where it becomes bfloat16 (with one scale per output exactly,
since whole numbers up to 256 are), and is multiplied with x transposed (wgmma, float32 sums): outputs are the 64 rows
that wgmma wants, so that few rows of x waste nothing. Sums of the shares, one scale per output, and the turn back to
rows are left to XLA, which makes one kernel of them.

Knows nothing of how the weight came to be quantised.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32

from pallas_kernels.gpu_chip import COMPILER, JAX_0_10, PROGRAMS, require_hopper
from pallas_kernels.quant_matmul.arrays import Numbers, Offset, Product, Rows, Scale, group_of

OUTPUTS = 64
"""Outputs of a program: the rows of one wgmma."""
ROWS = (8, 16, 32, 64, 128)
"""Rows of x that a program takes, the fewest that hold all; 256 would fill a warpgroup's registers with sums."""
INPUTS = (128, 64)
"""Inputs of a stage, the most that divide the weight's."""
ROOM = 160 * 1024
"""Bytes of shared memory for the ring, out of 227 KiB."""
STAGES = 4
"""Most stages of the ring."""


@dataclass(frozen=True)
class Cut:
    """How a product is cut: `rows` of x and `inputs` a stage, `group` inputs a scale, all in `shares` of the inputs."""

    rows: int
    inputs: int
    group: int
    shares: int
    whole: bool
    """One scale per output and no offset: nothing to decode but the numbers."""

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        return min(STAGES, ROOM // (self.inputs * (OUTPUTS + 2 * self.rows)))

    @property
    def width(self) -> int:
        """Inputs decoded at once: a group, or what a swizzled line of 128 bytes holds."""
        return min(self.inputs, 64) if self.whole else min(self.group, self.inputs, 64)


@partial(jax.jit, static_argnames=("dtype", "interpret"))
def quant_matmul(
    x: Rows, values: Numbers, scale: Scale, offset: Offset | None, *, dtype: Any, interpret: Any = False
) -> Product:
    """As the reference, but for this: a weight of several groups, or with offsets, is rounded to bfloat16.

    Raises ValueError where the groups do not divide i, and NotImplementedError for what the kernel cannot do.
    """
    cut = _cut(x, values, scale, offset)
    rows = x.shape[0]
    x = jnp.pad(x, ((0, -rows % cut.rows), (0, 0)))
    sums = _sums(x, values, scale, offset, cut, interpret).sum(axis=0)
    if cut.whole:
        sums = sums * scale.astype(jnp.float32)
    return sums.T[:rows].astype(dtype)


def _cut(x: Rows, values: Numbers, scale: Scale, offset: Offset | None) -> Cut:
    group, (outputs, inputs) = group_of(values, scale), values.shape
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"x is {x.dtype}; the tensor cores take bfloat16, which would round it")
    if outputs % OUTPUTS:
        raise NotImplementedError(f"{outputs} outputs; the kernel takes multiples of {OUTPUTS}")
    require_hopper()
    whole = group == inputs and offset is None
    tile = next((tile for tile in INPUTS if inputs % tile == 0), None)
    if tile is None:
        raise NotImplementedError(f"{inputs} inputs; the kernel takes multiples of {INPUTS[-1]}")
    if not whole and (group % 16 or tile % min(group, 64) or group % min(group, 64)):
        raise NotImplementedError(f"groups of {group} inputs; the kernel takes 16, 32 and multiples of 64")
    rows = next((rows for rows in ROWS if x.shape[0] <= rows), ROWS[-1])
    programs = outputs // OUTPUTS * -(-x.shape[0] // rows)
    return Cut(rows, tile, group, _shares(programs, inputs // tile), whole)


def _shares(programs: int, tiles: int) -> int:
    """The fewest equal shares of a weight's tiles that make `PROGRAMS`, or leave two rings' worth to each."""
    fitting = (shares for shares in range(1, tiles + 1) if tiles % shares == 0)
    return next(shares for shares in fitting if programs * shares >= PROGRAMS or shares * 2 * STAGES >= tiles)


def _sums(
    x: Rows, values: Numbers, scale: Scale, offset: Offset | None, cut: Cut, interpret: Any
) -> Float32[Array, "shares o n"]:
    outputs, rows = values.shape[0], x.shape[0]
    decoding = () if cut.whole else (scale, *(() if offset is None else (offset,)))
    multiply: Any = pl.kernel(
        partial(_body, cut=cut, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((cut.shares, outputs, rows), jnp.float32),
        mesh=plgpu.Mesh(
            grid=(outputs // OUTPUTS, rows // cut.rows, cut.shares),
            grid_names=("outputs", "rows", "share"),
            kernel_name="quant_matmul",
        ),
        compiler_params=COMPILER,
        interpret=interpret,
        name="quant_matmul",
    )
    return multiply(x, values, *(each.astype(jnp.float32) for each in decoding))


def _tiled(shape: tuple[int, ...], dtype: Any, line: int) -> Any:
    """Shared memory in tiles of 8 lines of `line` numbers, as TMA writes and wgmma reads them without conflicts."""
    bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits
    swizzle = line * bits // 8
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(swizzle)))


def _body(x: Any, values: Any, *refs: Any, cut: Cut, interpret: Any) -> None:
    *decoding, out = refs
    outputs = pl.ds(lax.axis_index("outputs") * OUTPUTS, OUTPUTS)
    rows = pl.ds(lax.axis_index("rows") * cut.rows, cut.rows)
    share = lax.axis_index("share")
    steps = values.shape[1] // cut.inputs // cut.shares

    def run(numbers: Any, inputs: Any, weight: Any, here: Any) -> None:
        def fetch(step: Any) -> None:
            stage = lax.rem(step, jnp.int32(cut.stages))
            part = pl.ds((share * steps + step) * cut.inputs, cut.inputs)
            plgpu.copy_gmem_to_smem(values.at[outputs, part], numbers.at[stage], here.at[stage])
            plgpu.copy_gmem_to_smem(x.at[rows, part], inputs.at[stage], here.at[stage])

        for step in range(min(cut.stages - 1, steps)):
            fetch(jnp.int32(step))

        def turn(step: Any, sums: Array) -> Array:
            stage = lax.rem(step, jnp.int32(cut.stages))
            pl.when(step + cut.stages - 1 < steps)(lambda: fetch(step + cut.stages - 1))
            plgpu.barrier_wait(here.at[stage])
            tile = numbers[stage]
            for begin in range(0, cut.inputs, cut.width):
                part = lax.slice(tile, (0, begin), (OUTPUTS, begin + cut.width))
                if not cut.whole:
                    group = lax.div((share * steps + step) * cut.inputs + begin, jnp.int32(cut.group))
                    part = _decode(part, [_column(each, outputs, group, interpret) for each in decoding])
                weight[:, pl.ds(begin, cut.width)] = part.astype(jnp.bfloat16)
            plgpu.commit_smem()
            return sums + _dot(weight, inputs.at[stage], interpret)

        out[share, outputs, rows] = lax.fori_loop(0, steps, turn, jnp.zeros((OUTPUTS, cut.rows), jnp.float32))

    pl.run_scoped(
        run,
        _tiled((cut.stages, OUTPUTS, cut.inputs), values.dtype, cut.inputs),
        _tiled((cut.stages, cut.rows, cut.inputs), jnp.bfloat16, cut.width),
        _tiled((OUTPUTS, cut.inputs), jnp.bfloat16, cut.width),
        plgpu.Barrier(num_arrivals=2, num_barriers=cut.stages),
    )


def _decode(part: Any, decoding: list[Float32[Array, " o"]]) -> Float32[Array, "o i"]:
    """Numbers times their outputs' scale, and the offset added if there is one."""
    across = [lax.broadcast_in_dim(each, part.shape, [0]) for each in decoding]
    decoded = part.astype(jnp.float32) * across[0]
    return decoded if len(across) == 1 else decoded + across[1]


def _column(matrix: Any, rows: Any, column: Any, interpret: Any) -> Float32[Array, " o"]:
    """One number a row, out of global memory, where no load is ever what Mosaic GPU calls optimised."""
    if interpret and JAX_0_10:
        return matrix[rows, column]
    whole: tuple[Any, ...] = (...,) if JAX_0_10 else ()
    return plgpu.load(matrix.at[rows, column], *whole, optimized=False)


def _dot(weight: Any, inputs: Any, interpret: Any) -> Float32[Array, "o n"]:
    """weight @ inputs.T on tensor cores, both in shared memory."""
    if interpret and JAX_0_10:
        return jnp.dot(weight[...], inputs[...].T, preferred_element_type=jnp.float32)

    def multiply(product: Any) -> Array:
        plgpu.wgmma(product, weight, inputs.transpose((1, 0)))
        return product[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((OUTPUTS, inputs.shape[0]), jnp.float32))
