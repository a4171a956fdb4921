"""The fields that every family has, read from either kind of configuration: sizes, norm epsilon, tied head.

Knows: their names in `config.json` and in GGUF metadata. Knows no family; what differs is an argument.
"""

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import ConfigError
from jaxinfer.model.families.fields import MAX_LAYERS, Fields

Shapes = Mapping[str, tuple[int, ...]]
Windows = tuple[int | None, ...]


def sizes_from_hf(
    fields: Fields,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    tied: bool = False,
) -> dict[str, Any]:
    """ModelConfig's sizes out of a `config.json`; the arguments are the family's defaults (None: as many kv heads as
    heads, width / heads features a head). `context` is `max_position_embeddings` as written.
    """
    width, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    return {
        "vocab_size": fields.whole("vocab_size"),
        "width": width,
        "layers": fields.whole("num_hidden_layers", high=MAX_LAYERS),
        "heads": heads,
        "kv_heads": fields.whole("num_key_value_heads", kv_heads or heads),
        "head_dim": fields.whole("head_dim", head_dim or max(width // heads, 1)),
        "mlp_width": fields.whole("intermediate_size"),
        "context": fields.whole("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", norm_eps),
        "tied_head": fields.flag("tie_word_embeddings", tied),
    }


def sizes_from_gguf(fields: Fields, shapes: Shapes, arch: str, *, head_dim: int | None = None) -> dict[str, Any]:
    """ModelConfig's sizes out of a GGUF file: the vocabulary is the embedding's rows; the head is tied where the file
    has none. Raises ConfigError where a value's features are not as many as a key's.
    """
    width, heads = fields.whole(f"{arch}.embedding_length"), fields.whole(f"{arch}.attention.head_count")
    head_dim = fields.whole(f"{arch}.attention.key_length", head_dim or max(width // heads, 1))
    fields.expect(f"{arch}.attention.value_length", head_dim)
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "width": width,
        "layers": fields.whole(f"{arch}.block_count", high=MAX_LAYERS),
        "heads": heads,
        "kv_heads": fields.whole(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
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


def every(pattern: int, window: int, layers: int) -> Windows:
    """Windows on all layers but each `pattern`-th, which sees everything."""
    return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(layers))
