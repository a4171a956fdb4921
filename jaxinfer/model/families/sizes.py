"""The fields that every family has, read from either kind of configuration: sizes, norm epsilon, tied head.

Knows: their names in `config.json` and in GGUF metadata. Knows no family.
"""

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import ConfigError
from jaxinfer.model.families.fields import MAX_LAYERS, Fields

Shapes = Mapping[str, tuple[int, ...]]
Windows = tuple[int | None, ...]


def sizes_from_hf(fields: Fields) -> dict[str, Any]:
    """ModelConfig's sizes out of a `config.json`; a family's own defaults come with `Fields.with_defaults`.

    As many kv heads as heads, and width / heads features a head, where the file does not say. `context` is
    `max_position_embeddings` as written.
    """
    width, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    return {
        "vocab_size": fields.whole("vocab_size"),
        "width": width,
        "layers": fields.whole("num_hidden_layers", high=MAX_LAYERS),
        "heads": heads,
        "kv_heads": fields.whole("num_key_value_heads", heads),
        "head_dim": fields.whole("head_dim", max(width // heads, 1)),
        "mlp_width": fields.whole("intermediate_size"),
        "context": fields.whole("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tied_head": fields.flag("tie_word_embeddings", False),
    }


def sizes_from_gguf(fields: Fields, shapes: Shapes, arch: str, *, head_dim: int | None = None) -> dict[str, Any]:
    """ModelConfig's sizes out of a GGUF file. head_dim: the family's own, for a file without.

    Raises ConfigError where a value's features are not as many as a key's.
    """
    sizes = plain_sizes_from_gguf(fields, shapes, arch)
    head_dim = fields.whole(f"{arch}.attention.key_length", head_dim or max(sizes["width"] // sizes["heads"], 1))
    fields.expect(f"{arch}.attention.value_length", head_dim)
    kv_heads = fields.whole(f"{arch}.attention.head_count_kv", sizes["heads"])
    return {**sizes, "kv_heads": kv_heads, "head_dim": head_dim}


def plain_sizes_from_gguf(fields: Fields, shapes: Shapes, arch: str) -> dict[str, Any]:
    """The sizes but for those of keys and values: the vocabulary is the embedding's rows, and the head is tied where
    the file has none.
    """
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "width": fields.whole(f"{arch}.embedding_length"),
        "layers": fields.whole(f"{arch}.block_count", high=MAX_LAYERS),
        "heads": fields.whole(f"{arch}.attention.head_count"),
        "mlp_width": fields.whole(f"{arch}.feed_forward_length"),
        "context": fields.whole(f"{arch}.context_length"),
        "norm_eps": fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "tied_head": "output.weight" not in shapes,
    }


def windows_by_type(fields: Fields, layers: int, window: int | None) -> Windows | None:
    """A window or None per layer as `layer_types` says; None where the file does not say. () where no layer has one.

    Raises ConfigError for another kind of layer, another number of them, or windowed layers without a window.
    """
    types = fields.get("layer_types")
    if types is None:
        return None
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or not all(kind in known for kind in types):
        raise ConfigError(f"layer_types is {types!r:.80}; expected {layers} times one of {', '.join(known)}")
    if known[0] not in types:
        return ()
    if window is None:
        raise ConfigError("layer_types has sliding_attention, but sliding_window is null; expected its size")
    return tuple(window if kind == known[0] else None for kind in types)


def everywhere(window: int | None, layers: int) -> Windows:
    """The same window on every layer; none for None."""
    return () if window is None else (window,) * layers


def every(pattern: int, window: int, layers: int) -> Windows:
    """Windows on all layers but each `pattern`-th, which sees everything."""
    return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(layers))
