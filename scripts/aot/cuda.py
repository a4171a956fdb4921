"""Compiles a function for an H200 that is not there, and collects what came of it.

XLA's plugin for CUDA compiles for a GPU that is described to it, and Mosaic GPU writes down each kernel's code. Needs
`start` first. One program at a time: kernels of all are written to one folder.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from aot.compiling import empty, uncached
from aot.sass import Code, parse
from jaxinfer.roofline import CHIPS

TOOLS = ("ptxas", "nvdisasm")

H200 = CHIPS["H200"]
CORES = 132
"""Streaming multiprocessors (SM)."""
REGISTERS = 65_536
"""Of an SM, 4 bytes each."""
SHARED_MEMORY = 233_472
"""Bytes of an SM, of which each program's share is rounded up by 1,024 that the driver keeps."""
TENSOR_RATE = 4_096
"""Multiplications and additions of bfloat16 that an SM's tensor cores do a cycle: 512 products of each of the four."""
CLOCK = H200.flops / CORES / TENSOR_RATE
"""Cycles a second at which the data sheet's peak is reached."""
# Fields are those of XLA's `GpuTargetConfigProto`; numbers are from NVIDIA's "CUDA C++ Programming Guide", technical
# specifications of compute capability 9.0, and the H200's data sheet.
TARGET = f"""
platform_name: "CUDA"
gpu_device_info {{
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  core_count: {CORES}
  clock_rate_ghz: {CLOCK / 1e9:.3f}
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: {REGISTERS}
  registers_per_block_limit: {REGISTERS}
  shared_memory_per_core: {SHARED_MEMORY}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {SHARED_MEMORY - 1_024}
  l2_cache_size: 52428800
  memory_bandwidth: {H200.bandwidth:.0f}
  device_memory_size: {H200.memory:.0f}
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
"""

CALL = re.compile(r'custom-call\([^\n]*custom_call_target="mosaic_gpu\w*"[^\n]*op_name="[^"\n]*\bjit\((\w+)\)')
HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')
LAUNCH = re.compile(
    r"gpu\.launch .*? threads\(.*?\) in \(%\w+ = %c(\d+)\w*, %\w+ = %c(\d+)\w*, %\w+ = %c(\d+)\w*\) "
    r"dynamic_shared_memory_size %c(\d+)"
)
_dumps = TemporaryDirectory(prefix="gpu-aot-")  # goes with the process
_written: dict[str, "Kernel"] = {}
"""Kernels of this process by their hash: Mosaic GPU compiles those of equal code once, and writes them down once."""


class NoCudaError(Exception):
    """The compiler is not where it was said to be."""


@dataclass(frozen=True)
class Kernel:
    """One kernel. registers: of a thread. spilled: bytes of a thread that did not fit, stored and loaded.

    shared: bytes of a program (a CUDA thread block).
    """

    registers: int
    spilled: int
    shared: int
    threads: int
    code: Code

    @property
    def programs(self) -> int:
        """How many programs an SM runs side by side."""
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * self.threads)  # handed out by 8 a thread
        return min(by_registers, SHARED_MEMORY // (self.shared + 1_024))


@dataclass(frozen=True)
class Program:
    """What the compiler made. calls: the operations whose Pallas kernels it calls, in the order of its text."""

    text: str
    calls: tuple[str, ...]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    seconds: float

    @property
    def bytes(self) -> int:
        """What the device must hold while the program runs."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes

    @property
    def kernel(self) -> Kernel:
        """The kernel of a program that has but one. Raises ValueError for another program."""
        found = set(HASH.findall(self.text))
        if len(found) != 1 or not found <= _written.keys():
            raise ValueError(f"expected a program of one kernel; got {len(found)}, calls {self.calls}")
        return _written[found.pop()]


def dma_cycles(size: float) -> float:
    """Cycles in which the memory brings an SM `size` bytes, while all SMs read."""
    return size / (H200.bandwidth / CORES) * CLOCK


def toolkit() -> Path:
    """NVIDIA's folder on the path. Raises NoCudaError where what is needed of it, or JAX's plugin, is not there."""
    places = [Path(place) for place in getattr(find_spec("nvidia"), "submodule_search_locations", ())]
    for folder in (place / "cu13" for place in places):
        if all((folder / "bin" / tool).exists() for tool in TOOLS) and find_spec("jax_cuda13_plugin"):
            return folder
    needs = f"JAX's plugin for CUDA 13 and NVIDIA's {' and '.join(TOOLS)}"
    raise NoCudaError(
        f"no compiler for CUDA: expected {needs} on the path. `make cuda` installs them: PYTHONPATH=.venv/cuda"
    )


@cache
def start() -> Path:
    """Make JAX use the compiler; the folder of the dumps. Raises NoCudaError as `toolkit` does.

    Call it before JAX is asked for anything. The compiler is on the path when JAX is imported, or JAX does not find it.
    """
    toolkit()
    options = "--xla_gpu_autotune_level=0"  # nothing can be timed
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {options}".strip()
    os.environ["MOSAIC_GPU_DUMP_TO"] = _dumps.name
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # JAX has set 1: it would warn that a GPU lets it choose a faster sort
    jax.devices()  # registers the plugin
    return Path(_dumps.name)


@cache
def mesh() -> Mesh:
    """One H200. The axis is Auto, as the engine's is."""
    start()
    found = topologies.get_topology_desc("h200", "cuda", topology="1x1x1", target_config=TARGET)
    return Mesh(np.array(found.devices[:1]), ("tensor",), axis_types=(AxisType.Auto,))


def on(devices: Mesh, tree: Any) -> Any:
    """A tree of shapes, each whole on the device."""
    whole = NamedSharding(devices, PartitionSpec())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), tree)


def compile_lowered(lower: Callable[[], jax.stages.Lowered]) -> Program:
    """Lower, of shapes that lie on `mesh`, and compile. Raises what the compiler raises."""
    folder = start()
    empty(folder)
    begin = time.monotonic()
    with uncached():
        compiled = lower().compile()
    seconds = time.monotonic() - begin
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    kernels, hashes = list(_kernels(folder)), set(HASH.findall(text)) - _written.keys()
    if len(kernels) == len(hashes) == 1:  # of several nobody says which is which
        _written[hashes.pop()] = kernels[0]
    empty(folder)
    return Program(
        text=text,
        calls=tuple(CALL.findall(text)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        seconds=seconds,
    )


def _kernels(folder: Path) -> Iterator[Kernel]:
    for path in sorted(folder.glob("*.ptxas")):
        said = path.read_text()
        launch = LAUNCH.search(path.with_suffix(".mlir-passes.log").read_text())
        code = path.with_suffix(".sass_ctrl")
        if not launch or not code.exists():
            raise ValueError(f"the compiler wrote no launch or no code of {path.stem}; was it started before `start`?")
        x, y, z, shared = map(int, launch.groups())
        yield Kernel(
            registers=_number(r"Used (\d+) registers", said),
            spilled=_number(r"(\d+) bytes spill stores", said) + _number(r"(\d+) bytes spill loads", said),
            shared=shared,
            threads=x * y * z,
            code=parse(code.read_text()),
        )


def _number(pattern: str, text: str) -> int:
    """Raises ValueError where the text does not say it."""
    found = re.search(pattern, text)
    if not found:
        raise ValueError(f"expected ptxas to say {pattern!r}; got {text[:200]!r}")
    return int(found[1])
