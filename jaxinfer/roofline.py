"""How fast a step could be: the FLOPs it needs, the bytes it must move, and the chip's limits on both.

Roofline model: Williams, Waterman, Patterson, CACM 52(4), 2009. Knows: chips by their data sheets, and a step's cost
from the configuration alone. Measures nothing and does not import JAX. FLOPs count a multiply and an add as two;
bytes count weights, keys and values, which no cache holds; activations are left out, since a good program keeps them
on the chip. So a bound is a lower bound of the time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jaxinfer.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Chip:
    """One device: FLOP/s at the dtype of the weights, bytes/s of its memory, bytes of it; JAX's name for its kind.

    platform is None for what JAX runs on.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    platform: str | None = None

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on a step is bound by compute."""
        return self.flops / self.bandwidth


GIB = 2.0**30
CHIPS = {
    chip.name: chip
    for chip in (
        # Dense bfloat16 with float32 sums, from the vendors' data sheets.
        Chip("TPU v4", 275e12, 1_228e9, 32 * GIB, "tpu"),
        Chip("TPU v5e", 197e12, 819e9, 16 * GIB, "tpu"),
        Chip("TPU v5p", 459e12, 2_765e9, 95 * GIB, "tpu"),
        Chip("TPU v6e", 918e12, 1_640e9, 32 * GIB, "tpu"),
        Chip("TPU7x", 2_307e12, 7_380e9, 192 * GIB, "tpu"),
        Chip("A100", 312e12, 2_039e9, 80 * GIB, "gpu"),
        Chip("L4", 121e12, 300e9, 24 * GIB, "gpu"),
        Chip("H100", 989e12, 3_350e9, 80 * GIB, "gpu"),
        Chip("H200", 989e12, 4_800e9, 141 * GIB, "gpu"),
        Chip("B200", 2_250e12, 7_700e9, 180 * GIB, "gpu"),
    )
}
"""By name; the GPUs are the SXM forms where there are several."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step takes. Costs add up."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.bytes

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time of a step, in seconds, and which of the chip's limits sets it."""

    seconds: float
    limit: Literal["compute", "memory"]


def bound(cost: Cost, chip: Chip, devices: int = 1) -> Bound:
    """The roofline over `devices` equal chips that share the work evenly and talk for free."""
    compute, memory = cost.flops / chip.flops / devices, cost.bytes / chip.bandwidth / devices
    return Bound(max(compute, memory), "compute" if compute >= memory else "memory")


def block_weights(config: ModelConfig, tokens: int | None = None) -> int:
    """Weights of all decoder blocks (norms and biases, a vector each, left out), or those that `tokens` pass through.

    These are the same but for experts, of which no two tokens are taken to share one as long as there are others.
    """
    attention = config.layers * (key_weights(config) + query_weights(config))
    return attention + sum(mlp_weights(config, layer, tokens) for layer in range(config.layers))


def key_weights(config: ModelConfig) -> int:
    """Weights of one layer that make what the cache holds of a token."""
    if config.latent is None:
        return config.width * 2 * config.kv_heads * config.head_dim
    return config.width * (config.latent.rank + config.latent.rope_dim)


def query_weights(config: ModelConfig) -> int:
    """The other weights of one layer's attention."""
    width, queries, latent = config.width, config.heads * config.head_dim, config.latent
    if latent is None:
        return 2 * width * queries
    made = queries * width if latent.query_rank is None else latent.query_rank * (width + queries)
    return made + config.heads * (latent.rank * (latent.content_dim + latent.value_dim) + latent.value_dim * width)


def mlp_weights(config: ModelConfig, layer: int, tokens: int | None = None) -> int:
    """Weights of the MLP of `layer`, or of its router, shared MLP and experts: all of them, or those of `tokens`."""
    experts = config.layer_experts(layer)
    if experts is None:
        return 3 * config.width * config.mlp_width
    running = experts.count if tokens is None else min(experts.count, tokens * experts.active)
    return config.width * (experts.count + 3 * (experts.shared_width + running * experts.width))


def head_weights(config: ModelConfig) -> int:
    """Weights of the head: the embedding's own where they are tied."""
    return config.width * config.vocab_size


def total_weights(config: ModelConfig) -> int:
    """All weights that memory must hold."""
    return block_weights(config) + head_weights(config) * (1 if config.tied_head else 2)


def kv_bytes_per_token(config: ModelConfig, dtype_bytes: int) -> int:
    """Bytes that the cache holds of one token, over all layers; numbers of one byte have a float32 scale per head."""
    planes, heads, features = config.cache_shape
    return config.layers * planes * heads * (features * dtype_bytes + (4 if dtype_bytes == 1 else 0))


def decode_cost(
    config: ModelConfig,
    lengths: Iterable[int],
    dtype_bytes: int,
    *,
    weight_bytes: float | None = None,
    kv_dtype_bytes: int | None = None,
) -> Cost:
    """One decode step of one row per entry; each entry counts the keys its query sees, its own included.

    dtype_bytes is that of weights, keys and values, unless weight_bytes (on average, where they are quantised) or
    kv_dtype_bytes is given.
    """
    lengths = list(lengths)
    cost = Cost(0.0, (block_weights(config, len(lengths)) + head_weights(config)) * (weight_bytes or dtype_bytes))
    for length in lengths:
        cost += _row_cost(config, tokens=1, length=length, kv_dtype_bytes=kv_dtype_bytes or dtype_bytes, sampled=1)
    return cost


def prefill_cost(
    config: ModelConfig,
    tokens: int,
    dtype_bytes: int,
    start: int = 0,
    *,
    weight_bytes: float | None = None,
    kv_dtype_bytes: int | None = None,
) -> Cost:
    """One prefill call of `tokens` behind `start` that are cached, logits for the last one; else as `decode_cost`."""
    held = kv_dtype_bytes or dtype_bytes
    last = config.layers - 1
    unread = mlp_weights(config, last, tokens) - mlp_weights(config, last, 1)  # which one token alone goes through
    weights = Cost(0.0, (block_weights(config, tokens) - unread + head_weights(config)) * (weight_bytes or dtype_bytes))
    return weights + _row_cost(config, tokens=tokens, length=start + tokens, kv_dtype_bytes=held, sampled=1)


def _row_cost(config: ModelConfig, *, tokens: int, length: int, kv_dtype_bytes: int, sampled: int) -> Cost:
    """What one row adds to the reading of the weights: its matmuls, its attention, its keys and values.

    Of the last block it needs all keys and values, and the rest for its last token alone.
    """
    beyond_keys = query_weights(config) + mlp_weights(config, config.layers - 1, 1)
    through_blocks = block_weights(config, 1) * tokens - beyond_keys * (tokens - 1)
    matmul = 2.0 * (through_blocks + head_weights(config) * sampled)
    pairs = read = 0
    for layer in range(config.layers):
        window = config.window(layer) or length
        queries = 1 if layer == config.layers - 1 else tokens
        pairs += _visible(length, window) - _visible(length - queries, window)
        read += min(length, window + queries - 1)
    per_token = kv_bytes_per_token(config, kv_dtype_bytes) // config.layers
    attention = 4.0 * config.heads * config.cache_shape[2] * pairs
    return Cost(matmul + attention, float(per_token * (read + tokens * config.layers)))


def _visible(length: int, window: int) -> int:
    """Query-key pairs of a causal sequence whose queries see at most `window` keys, their own included."""
    full = min(length, window)
    return full * (full + 1) // 2 + (length - full) * window
