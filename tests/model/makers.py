"""Configurations that the family tests share."""

from typing import Any


def without(raw: dict[str, Any], *names: str, **changes: Any) -> dict[str, Any]:
    """`raw` with `changes`, and less the fields `names`."""
    return {name: value for name, value in {**raw, **changes}.items() if name not in names}


def gguf_metadata(arch: str, **changes: Any) -> dict[str, Any]:
    """Metadata of a small model of `arch`. A dot may be spelled `__` in `changes`, and None leaves a field out."""
    fields = {
        "block_count": 4,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    named = {f"{arch}.{name}": value for name, value in fields.items() if value is not None}
    return {"general.architecture": arch, **named}
