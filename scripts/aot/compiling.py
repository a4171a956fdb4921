"""Compiles a function for a TPU generation and collects what came of it.

Needs `libtpu.start` first. Only one program at a time can be compiled and read: the compiler writes the dumps of all
to one folder, under names that they may share.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from aot import libtpu
from aot.bundles import Schedule, parse
from aot.chips import Generation, generation

BUNDLES, SLOTS = "final_bundles", "final_hlo-static-per-bundle-utilization"
DUMP = re.compile(rf"^\d+-(?P<operation>.+)-\d+-(?P<label>{BUNDLES}|{SLOTS})\.txt$")
PALLAS_CALL = re.compile(r'%?([\w.-]+) = [^\n]*? custom-call\([^\n]*custom_call_target="tpu_custom_call"')


@dataclass(frozen=True)
class Program:
    """What the compiler made. Bytes are those of one device.

    calls: the Pallas calls of the program, by their names in the HLO (`name.1`, where the call was given a name).
    kernels: their code. Calls of equal code share that of one of them, and only that one is here.
    """

    chip: Generation
    text: str
    calls: tuple[str, ...]
    kernels: Mapping[str, Schedule]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    code_bytes: int
    seconds: float

    @property
    def bytes(self) -> int:
        """What the device must hold while the program runs."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes + self.code_bytes

    def in_vmem(self, shape: tuple[int, ...]) -> bool:
        """Whether XLA lays an array of that shape into vector memory, before a kernel is called with it."""
        return bool(re.search(rf"\[{','.join(map(str, shape))}\]{{[^}}]*S\(1\)", self.text))

    def kernel(self, name: str) -> Schedule:
        """The kernel that was given that name; of several the one whose main loop waits for most.

        Raises ValueError where there is none.
        """
        found = [schedule for key, schedule in self.kernels.items() if given_name(key) == name]
        if not found:
            raise ValueError(f"expected a kernel {name!r}; the program has {sorted(self.kernels) or 'none'}")
        return max(found, key=lambda schedule: schedule.main.turn(1)[1] or 0 if schedule.main else 0)


def mesh(chip: str, devices: int = 1, axis: str = "tensor", topology: str | None = None) -> Mesh:
    """The first devices of a topology of that generation, in one row. The axis is Auto, as the engine's is."""
    found = _devices(topology or generation(chip).topology)
    if devices > len(found):
        raise ValueError(f"{topology or generation(chip).topology} has {len(found)} devices; expected {devices}")
    return Mesh(np.array(found[:devices]), (axis,), axis_types=(AxisType.Auto,))


@cache
def _devices(topology: str) -> list[Any]:
    libtpu.start()
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def on(devices: Mesh, tree: Any) -> Any:
    """A tree of shapes, each whole on every device of the mesh and laid out as `formats` says."""
    return jax.tree.map(
        lambda leaf, form: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=form), tree, formats(devices, tree)
    )


def formats(devices: Mesh, tree: Any) -> Any:
    """How kernels take arrays of these shapes: in the order of their axes.

    XLA would lay out a pool whose last axis is no multiple of 128 in another order, copy all of it before the kernel,
    and compile that copy for minutes. The engine's pools are of whole lanes (`jaxinfer/engine/lanes.py`).
    """
    whole = NamedSharding(devices, PartitionSpec())
    return jax.tree.map(lambda leaf: Format(Layout(tuple(range(leaf.ndim))), whole), tree)


def compile_for(chip: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """`function`, jitted unless it is already, for one device of that generation.

    args are shapes (`jax.ShapeDtypeStruct`), or trees of them; kwargs are static to a function that is not jitted yet.
    Raises what the compiler raises, jax.errors.JaxRuntimeError for a program that does not fit.
    """
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function, static_argnames=tuple(kwargs))
    devices = mesh(chip)
    return compile_lowered(chip, devices, lambda: jitted.lower(*on(devices, args), **kwargs))


def compile_lowered(chip: str, devices: Mesh, lower: Callable[[], jax.stages.Lowered]) -> Program:
    """Lower and compile. `lower` uses shapes whose shardings are on `devices`, a mesh of that generation."""
    folder = libtpu.start()
    empty(folder)
    start = time.monotonic()
    with uncached(), jax.set_mesh(devices):  # Pallas asks the mesh, or else this machine's CPU, which TPU it is
        compiled = lower().compile()
    seconds = time.monotonic() - start
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    calls = pallas_calls(text)
    kernels = read_kernels(folder, calls, generation(chip))
    empty(folder)
    return Program(
        chip=generation(chip),
        text=text,
        calls=tuple(calls),
        kernels=kernels,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        seconds=seconds,
    )


def compile_all(chip: str, jobs: Mapping[str, Callable[[], jax.stages.Lowered]]) -> dict[str, Exception]:
    """Compile every job on as many threads as there are cores and keep nothing; what the ones that fail raise, by name.

    Lowering is Python and takes its turn, the compiler runs beside it.
    """

    def run(lower: Callable[[], jax.stages.Lowered]) -> None:
        with jax.set_mesh(devices):  # of this thread
            lower().compile()

    folder, devices = libtpu.start(), mesh(chip)
    with uncached(), ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {name: pool.submit(run, lower) for name, lower in jobs.items()}
        errors = {name: future.exception() for name, future in futures.items()}
    empty(folder)
    return {name: error for name, error in errors.items() if isinstance(error, Exception)}


def pallas_calls(text: str) -> list[str]:
    """Names of the Pallas calls in the text of a compiled program, in its order."""
    return PALLAS_CALL.findall(text)


def given_name(call: str) -> str:
    """What a Pallas call was named, without what XLA adds: a number, and in libtpu 0.0.50 the array that it writes."""
    return call.partition(".")[0]


def read_kernels(folder: Path, names: Sequence[str], chip: Generation) -> dict[str, Schedule]:
    """What the compiler wrote about the operations of these names.

    Raises ValueError where it wrote of none of a given name.
    """
    files: dict[str, dict[str, Path]] = {name: {} for name in names}
    for path in folder.iterdir():
        match = DUMP.match(path.name)
        if match and match["operation"] in files:
            files[match["operation"]][match["label"]] = path
    whole = {name: of for name, of in files.items() if of.keys() == {BUNDLES, SLOTS}}
    if lost := {given_name(name) for name in files} - {given_name(name) for name in whole}:
        raise ValueError(
            f"the compiler wrote no bundles of {min(lost)}; was it started before `libtpu.start` was called?"
        )
    return {name: _schedule(of, chip) for name, of in whole.items()}


def _schedule(files: Mapping[str, Path], chip: Generation) -> Schedule:
    return parse(files[BUNDLES].read_text(), files[SLOTS].read_text(), delay=chip.branch_delay, granule=chip.granule)


@contextmanager
def uncached() -> Iterator[None]:
    """A program that comes from JAX's persistent cache writes no dumps."""
    kept = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks once whether there is a cache, and remembers
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
        compilation_cache.reset_cache()


def empty(folder: Path) -> None:
    """Remove what the compiler has written there."""
    shutil.rmtree(folder)
    folder.mkdir()
