"""`jaxinfer plan`: what a model needs of each kind of device, before a weight is read."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from jaxinfer.cli.flags import DEMO, RefArgument, engine_config, takes
from jaxinfer.cli.json_text import json_text
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.errors import ConfigError
from jaxinfer.roofline import (
    CHIPS,
    GIB,
    Chip,
    block_weights,
    bound,
    decode_cost,
    head_weights,
    prefill_cost,
    total_weights,
)


@takes(engine=engine_config)
def command(
    ref: RefArgument = DEMO,
    *,
    chip: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this chip, such as v6e; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    engine: EngineConfig,
) -> None:
    """Print what a model needs and could reach, chip by chip.

    Memory per device (weights, pages of the KV cache), the executables that warm-up compiles, and the least time that a
    step can take by the roofline: from the configuration alone, so nothing is loaded and no chip is needed
    (hf: is downloaded). Without --dtype weights and cache are bfloat16 here, as on the chips.

    \b
    jaxinfer plan
    jaxinfer plan ./my-model --tensor 4 --chip v6e --chip H100
    jaxinfer plan model.gguf --dtype bfloat16 --slots 64 --context 8192 --json
    """
    from jaxinfer.checkpoint.load import load_config, load_structs
    from jaxinfer.engine.runner import check_kernels
    from jaxinfer.model.quantised import bytes_per_weight, describe

    chips = [_chip(name) for name in chip or CHIPS]
    check_kernels(engine)
    engine = replace(engine, dtype=engine.dtype or "bfloat16")
    config = load_config(ref)
    params = load_structs(ref, str(engine.dtype), engine.quantize)
    weights, width = weight_bytes(config, params, engine.mesh.tensor), bytes_per_weight(params)
    rows = [plan_chip(config, engine, weights, each, width) for each in chips]
    print(json_text([asdict(row) for row in rows]) if as_json else _table(ref, config, engine, rows, describe(params)))


def _chip(name: str) -> Chip:
    """The chip of that name, which may be its end alone: v6e. Raises ConfigError for another."""
    found = [chip for full, chip in CHIPS.items() if full.lower().endswith(name.lower())]
    if len(found) != 1:
        raise ConfigError(f"--chip {name!r} is not known; expected one of {', '.join(CHIPS)}")
    return found[0]


@dataclass(frozen=True, slots=True)
class Row:
    """One chip. Bytes are per device; pages are None where not even the smallest pool fits beside the weights.

    Milliseconds are bounds: a decode step of one row and of all slots, each with half the context behind it, and a
    prefill of one whole chunk.
    """

    chip: str
    devices: int
    weight_bytes: float
    pages: int | None
    page_bytes: float
    decode_one_ms: float
    decode_full_ms: float
    decode_limit: str
    prefill_ms: float
    prefill_limit: str


def plan_chip(
    config: ModelConfig, engine: EngineConfig, weights: float, chip: Chip, weight_width: float | None = None
) -> Row:
    """The plan of one kind of chip; `weights` as `weight_bytes` gives them.

    weight_width: bytes of one weight of the large matrices, on average; None where they are plain.

    Raises ConfigError where `engine` cannot serve the model on any.
    """
    from jaxinfer.engine.cache import cache_dtype, page_bytes
    from jaxinfer.engine.runner import engine_context

    devices, dtype, context = engine.mesh.tensor, str(engine.dtype), engine_context(config, engine)
    width = 4 if dtype == "float32" else 2
    held, held_width = cache_dtype(engine, dtype), 1 if engine.cache.dtype else width
    half = max(1, context // 2)
    sizes: dict[str, Any] = {"weight_bytes": weight_width, "kv_dtype_bytes": held_width}
    one = bound(decode_cost(config, [half], width, **sizes), chip, devices)
    full = bound(decode_cost(config, [half] * engine.slots, width, **sizes), chip, devices)
    chunk = prefill_cost(config, min(engine.chunk, context), width, **sizes)
    prefill = bound(chunk, chip, devices)
    return Row(
        chip=chip.name,
        devices=devices,
        weight_bytes=weights,
        pages=_pages(config, engine, context, held, chip.memory - weights, chip.platform),
        page_bytes=page_bytes(config, engine.cache.tokens, held, devices, chip.platform) / devices,
        decode_one_ms=1e3 * one.seconds,
        decode_full_ms=1e3 * full.seconds,
        decode_limit=full.limit,
        prefill_ms=1e3 * prefill.seconds,
        prefill_limit=prefill.limit,
    )


def weight_bytes(config: ModelConfig, params: Any, devices: int) -> float:
    """Bytes of the weights on each of `devices`, split as the engine splits them; ConfigError where it cannot.

    params: the parameter tree as shapes and dtypes, plain or quantised.
    """
    from jaxinfer.engine.sharding import SPLIT_AXES, check_divisible
    from jaxinfer.model.quantised import bytes_of, parts_of
    from jaxinfer.model.transformer import logical_axes

    check_divisible(config, devices)
    total = 0.0
    for leaf, axes in zip(_leaves(params), _leaves(logical_axes(config)), strict=True):
        for part in parts_of(leaf):
            split = any(axis in SPLIT_AXES and size % devices == 0 for axis, size in zip(axes, part.shape, strict=True))
            total += bytes_of(part) / (devices if split else 1)
    return total


def _leaves(tree: Any) -> Iterator[Any]:
    """Leaves of nested dicts, by their keys' order."""
    for _, value in sorted(tree.items()):
        yield from _leaves(value) if isinstance(value, dict) else (value,)


def _pages(
    config: ModelConfig, engine: EngineConfig, context: int, dtype: str, free: float, platform: str | None
) -> int | None:
    """Pages of the pool in `free` bytes a device; None where they do not fit."""
    from jaxinfer.engine.cache import page_bytes, pool_pages

    try:
        pages = pool_pages(config, engine, context, dtype, lambda: int(free * engine.mesh.tensor), platform)
    except ConfigError:
        return None
    devices = engine.mesh.tensor
    needed = pages * page_bytes(config, engine.cache.tokens, dtype, devices, platform) / devices
    return pages if needed <= free else None


def _table(ref: str, config: ModelConfig, engine: EngineConfig, rows: list[Row], kept: str) -> str:
    """kept: how quantised matrices are kept; empty where none is."""
    executables = 1 + len(engine.prefill_buckets) + len(engine.decode_buckets)
    kind = f" in {engine.cache.dtype}" if engine.cache.dtype else ""
    head = [
        f"{ref}: {config.family}, {config.layers} layers, width {config.width}, vocabulary {config.vocab_size}; "
        f"{_weights(config)}",
        f"{engine.dtype} on {engine.mesh.tensor} device(s); {rows[0].weight_bytes / GIB:.2f} GiB of weights"
        f"{f' ({kept})' if kept else ''} and "
        f"{_sizes(rows)} MiB a page of {engine.cache.tokens} tokens{kind} on each",
        f"{executables} executables: prefill of {_listed(engine.prefill_buckets)} tokens, decode of "
        f"{_listed(engine.decode_buckets)} rows, seat",
        "",
    ]
    columns = ("chip", "pages", "tokens held", "decode, 1 row", f"decode, {engine.slots} rows", "bound by")
    columns = (*columns, f"prefill, {engine.chunk}", "bound by")
    lines = [columns, ("---", *("--:",) * (len(columns) - 1)), *(_cells(row, engine.cache.tokens) for row in rows)]
    return "\n".join([*head, *("| " + " | ".join(line) + " |" for line in lines)])


def _sizes(rows: list[Row]) -> str:
    """MiB of a page, which differ where a kind of chip keeps whole lanes."""
    return " to ".join(f"{size / 2**20:.2f}" for size in sorted({row.page_bytes for row in rows}))


def _weights(config: ModelConfig) -> str:
    """How many weights there are, and how many of them a token passes through where experts are chosen."""
    total = f"{total_weights(config):,} weights"
    chosen = block_weights(config, tokens=1) + head_weights(config)
    return f"{total}, {chosen:,} of them for each token" if config.experts else total


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _cells(row: Row, page_size: int) -> tuple[str, ...]:
    held = ("does not fit", "-") if row.pages is None else (f"{row.pages}", f"{row.pages * page_size}")
    times = (f"{row.decode_one_ms:.2f} ms", f"{row.decode_full_ms:.2f} ms", row.decode_limit)
    return (row.chip, *held, *times, f"{row.prefill_ms:.2f} ms", row.prefill_limit)
