"""The TPU generations: how each is named to the compiler, its clock, its cores, and how fast its memory feeds one core.

Bandwidth and memory are those of `jaxinfer.roofline.CHIPS`, per chip. One JAX device is a whole chip but on TPU7x,
whose chip is two devices, and on v4, whose two cores libtpu hands out as two devices when it compiles without a chip.
"""

from dataclasses import dataclass

from jaxinfer.roofline import CHIPS, Chip


@dataclass(frozen=True)
class Generation:
    """One generation. `cores` is TensorCores a chip, `devices` is JAX devices a chip.

    clock: cycles a second of a TensorCore; a bundle is issued in one cycle where nothing stalls. branch_delay: bundles
    behind a branch that run before it is taken. granule: bytes of the unit in which compiled code counts a copy. Both
    are read off compiled code, and tests/tpu_aot/test_bundles.py finds them there again.
    """

    name: str
    topology: str
    chip: Chip
    clock: float
    cores: int
    devices: int
    branch_delay: int
    granule: int

    @property
    def device_memory(self) -> float:
        """Bytes of HBM that one JAX device has."""
        return self.chip.memory / self.devices

    @property
    def core_bandwidth(self) -> float:
        """Bytes a second that one core gets while all cores of its chip read."""
        return self.chip.bandwidth / self.cores

    def dma_cycles(self, size: float) -> float:
        """Cycles of one core in which the memory brings it `size` bytes."""
        return size / self.core_bandwidth * self.clock


GENERATIONS = {
    generation.name: generation
    for generation in (
        Generation("v4", "v4:2x2x1", CHIPS["TPU v4"], 1.05e9, cores=2, devices=2, branch_delay=1, granule=512),
        Generation("v5e", "v5e:2x2", CHIPS["TPU v5e"], 1.5e9, cores=1, devices=1, branch_delay=4, granule=32),
        Generation("v5p", "v5p:2x2x1", CHIPS["TPU v5p"], 1.75e9, cores=2, devices=1, branch_delay=4, granule=32),
        Generation("v6e", "v6e:2x2", CHIPS["TPU v6e"], 1.75e9, cores=1, devices=1, branch_delay=4, granule=32),
        Generation("tpu7x", "tpu7x:2x2x1", CHIPS["TPU7x"], 2.2e9, cores=2, devices=2, branch_delay=6, granule=32),
    )
}
"""By name, oldest first."""


def generation(name: str) -> Generation:
    """The generation of that name. Raises ValueError for another."""
    if name not in GENERATIONS:
        raise ValueError(f"no TPU generation {name!r}; expected one of {', '.join(GENERATIONS)}")
    return GENERATIONS[name]
