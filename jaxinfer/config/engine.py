"""The cache, the mesh and the engine: how much is held, where, and which shapes are compiled."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from jaxinfer.config.checks import require

DTypeName = Literal["float32", "bfloat16", "float16"]
QuantizeName = Literal["int8", "int4", "stored"]
"""int8: one scale per output channel; int4: groups of up to 32; stored: as a GGUF file or our directory has them."""
KVDTypeName = Literal["int8"]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The page pool: `pages` of them where given, else what `memory_fraction` of the memory holds: on CPU of
    the host's, elsewhere of what the weights leave on the device.

    page_size: tokens of a page; None: 64, or 128 in int8, where a page's scales then fill a TPU's lanes and are not
    copied around each kernel (docs/tpu.md). dtype: of keys and values: None as the model computes, or int8 with a
    float32 scale per head and token.
    """

    page_size: int | None = None
    pages: int | None = None
    memory_fraction: float = 0.2
    dtype: KVDTypeName | None = None

    def __post_init__(self) -> None:
        sizes = (8, 16, 32, 64, 128, 256)
        require(self.tokens in sizes, f"page_size is {self.page_size}; expected one of {', '.join(map(str, sizes))}")
        require(self.pages is None or self.pages > 0, f"pages is {self.pages}; expected a positive number")
        require(0 < self.memory_fraction <= 0.95, f"memory_fraction is {self.memory_fraction}; expected 0 to 0.95")
        names = get_args(KVDTypeName)
        require(self.dtype in (None, *names), f"the cache's dtype is {self.dtype!r}; expected one of {names}, or None")

    @property
    def tokens(self) -> int:
        """Tokens of a page."""
        if self.page_size is None:
            return 128 if self.dtype == "int8" else 64
        return self.page_size


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """How many devices share one model: `tensor` splits heads, MLP and vocabulary."""

    tensor: int = 1

    def __post_init__(self) -> None:
        require(self.tensor >= 1, f"tensor is {self.tensor}; expected 1 or more devices")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much the engine holds and which shapes it compiles.

    slots: sequences decoded together. context: most tokens of a sequence (None: the model's own). chunk: most prompt
    tokens of one prefill call. queue: requests that may wait. dtype: of weights and cache (None: float32 on CPU,
    bfloat16 elsewhere). quantize: what the large matrices become instead (None: what they are). deterministic: one
    decode bucket and chunks at multiples of `chunk`, so that results are bitwise equal whatever the neighbours.
    prefix_cache: share full pages between equal prompts. kernels: pairs of an operation and the form of it to run
    instead of the platform's default, as `pallas_kernels.dispatch` names them.
    """

    slots: int = 32
    context: int | None = None
    chunk: int = 512
    queue: int = 1_024
    dtype: DTypeName | None = None
    quantize: QuantizeName | None = None
    deterministic: bool = False
    prefix_cache: bool = True
    kernels: tuple[tuple[str, str], ...] = ()
    cache: CacheConfig = field(default_factory=CacheConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        require(1 <= self.slots <= 4096, f"slots is {self.slots}; expected 1 to 4096")
        require(self.context is None or self.context > 1, f"context is {self.context}; expected 2 tokens or more")
        names = get_args(DTypeName)
        require(self.dtype is None or self.dtype in names, f"dtype is {self.dtype!r}; expected one of {names}")
        kinds = get_args(QuantizeName)
        require(
            self.quantize is None or self.quantize in kinds,
            f"quantize is {self.quantize!r}; expected one of {kinds}, or nothing",
        )
        require(self.queue >= 1, f"queue is {self.queue}; expected 1 or more")
        require(
            self.chunk > 0 and self.chunk % self.cache.tokens == 0,
            f"chunk is {self.chunk}; expected a multiple of page_size {self.cache.tokens}, at least one page",
        )
        operations = [operation for operation, _ in self.kernels]
        require(
            len(operations) == len(set(operations)),
            f"kernels are {', '.join(map('='.join, self.kernels))}; expected one form of each operation",
        )

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Row counts that the decode step is compiled for: 1, powers of two from 8 up, and `slots`; or `slots` alone.

        Between 2 and 8 rows the weights are what is read, and a step costs nearly the same: 33 to 42 ms on CPU.
        """
        if self.deterministic:
            return (self.slots,)
        powers = (2**i for i in (0, *range(3, 13)))
        return (*(rows for rows in powers if rows < self.slots), self.slots)

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Token counts that the prefill step is compiled for: `chunk` and its quarters down to 32 tokens."""
        floor = self.chunk if self.deterministic else min(self.chunk, 32)
        buckets = [self.chunk]
        while buckets[-1] // 4 >= floor:
            buckets.append(buckets[-1] // 4)
        return tuple(sorted(buckets))
