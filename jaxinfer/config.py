"""Frozen configuration, checked when it is made: the model's arithmetic, the cache, the mesh, the engine.

Knows: which fields there are and which pairs of them cannot work. Reads no file, no environment, imports no JAX.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from jaxinfer.errors import ConfigError

RopeKind = Literal["default", "linear", "llama3"]
Activation = Literal["silu", "gelu_tanh"]
DTypeName = Literal["float32", "bfloat16", "float16"]


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def _require_number(config: Any, *names: str) -> None:
    """Positive numbers of a sane size; anything else than a number would only fail deep inside a traced step."""
    for name in names:
        value = getattr(config, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        _require(number and 0 < value < 1e18, f"{name} is {value!r:.80}; expected a positive number below 1e18")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and how it is stretched.

    linear divides every phase by `factor`; llama3 divides low frequencies only (Llama 3.1's `rope_scaling`), between
    `low_freq_factor` and `high_freq_factor` wavelengths of `original_context`.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8_192

    def __post_init__(self) -> None:
        _require_number(self, "theta", "factor", "low_freq_factor", "high_freq_factor", "original_context")
        _require(self.kind in ("default", "linear", "llama3"), f"rope kind is {self.kind!r}; not one we know")
        _require(self.factor >= 1, f"rope factor is {self.factor}; expected 1 or more")
        _require(
            self.kind != "llama3" or self.low_freq_factor < self.high_freq_factor,
            f"rope low_freq_factor {self.low_freq_factor} is not below high_freq_factor {self.high_freq_factor}",
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder's arithmetic depends on; a model family is a row of these switches.

    windows: per layer, how many keys a query sees, itself included; None sees all. local_rope serves the layers with a
    window where it is given. attention_bias adds a bias to q, k and v, output_bias one to the attention's output
    projection. post_norms adds a norm after attention and after the MLP, before the residual sum.
    query_scale multiplies q.k. Norm weights are stored ready to multiply: a family that stores w - 1 is folded at load.
    """

    family: str
    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    context: int
    query_scale: float
    norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None
    windows: tuple[int | None, ...] = ()
    activation: Activation = "silu"
    tied_head: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width", "context"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31
            _require(whole, f"{name} is {value!r:.80}; expected a positive whole number below 2**31")
        _require(self.heads % self.kv_heads == 0, f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        _require(
            self.head_dim % 2 == 0 and self.head_dim <= 2**16,  # its frequencies are made while the model is traced
            f"head_dim is {self.head_dim}; rotary embedding needs it even, and 65536 at the most",
        )
        _require(
            len(self.windows) in (0, self.layers),
            f"windows has {len(self.windows)} entries; expected one per layer, {self.layers}",
        )
        for window in self.windows:
            _require(
                window is None or (isinstance(window, int) and window > 0),
                f"windows holds {window!r:.80}; expected positive whole numbers, or None for a layer that sees all",
            )
        self._check_switches()

    def _check_switches(self) -> None:
        _require(isinstance(self.rope, RopeConfig), f"rope is {self.rope!r:.80}; expected a RopeConfig")
        _require(isinstance(self.local_rope, RopeConfig | None), f"local_rope is {self.local_rope!r:.80}")
        _require(isinstance(self.family, str), f"family is {self.family!r:.80}; expected a name")
        _require(self.activation in get_args(Activation), f"activation is {self.activation!r:.80}; not one we know")
        _require_number(self, "query_scale", "norm_eps", "embedding_scale")
        _require_number(self, *(n for n in ("attention_softcap", "logit_softcap") if getattr(self, n) is not None))
        for name in ("tied_head", "qk_norm", "post_norms", "attention_bias", "output_bias"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name} is {value!r:.80}; expected true or false")

    @property
    def group(self) -> int:
        """Query heads that share one key and value head."""
        return self.heads // self.kv_heads

    def window(self, layer: int) -> int | None:
        """Keys that a query of `layer` sees, itself included; None for all."""
        return self.windows[layer] if self.windows else None

    def layer_rope(self, layer: int) -> RopeConfig:
        """The rotary embedding of `layer`."""
        return self.local_rope if self.local_rope and self.window(layer) is not None else self.rope


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The page pool: `pages` of them where given, else what `memory_fraction` of the memory holds: on CPU of
    the host's, elsewhere of what the weights leave on the device.
    """

    page_size: int = 64
    pages: int | None = None
    memory_fraction: float = 0.2

    def __post_init__(self) -> None:
        _require(self.page_size in (8, 16, 32, 64, 128, 256), f"page_size is {self.page_size}; expected 8, 16 ... 256")
        _require(self.pages is None or self.pages > 0, f"pages is {self.pages}; expected a positive number")
        _require(0 < self.memory_fraction <= 0.95, f"memory_fraction is {self.memory_fraction}; expected 0 to 0.95")


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """How many devices share one model: `tensor` splits heads, MLP and vocabulary."""

    tensor: int = 1

    def __post_init__(self) -> None:
        _require(self.tensor >= 1, f"tensor is {self.tensor}; expected 1 or more devices")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much the engine holds and which shapes it compiles.

    slots: sequences decoded together. context: most tokens of a sequence (None: the model's own). chunk: most prompt
    tokens of one prefill call. queue: requests that may wait. dtype: of weights and cache (None: float32 on CPU,
    bfloat16 elsewhere). deterministic: one decode bucket and chunks at multiples of `chunk`, so that results are
    bitwise equal whatever the neighbours. prefix_cache: share full pages between equal prompts.
    """

    slots: int = 32
    context: int | None = None
    chunk: int = 512
    queue: int = 1_024
    dtype: DTypeName | None = None
    deterministic: bool = False
    prefix_cache: bool = True
    cache: CacheConfig = field(default_factory=CacheConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        _require(1 <= self.slots <= 4096, f"slots is {self.slots}; expected 1 to 4096")
        _require(self.context is None or self.context > 1, f"context is {self.context}; expected 2 tokens or more")
        names = get_args(DTypeName)
        _require(self.dtype is None or self.dtype in names, f"dtype is {self.dtype!r}; expected one of {names}")
        _require(self.queue >= 1, f"queue is {self.queue}; expected 1 or more")
        _require(
            self.chunk > 0 and self.chunk % self.cache.page_size == 0,
            f"chunk is {self.chunk}; expected a multiple of page_size {self.cache.page_size}",
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
