"""SmolLM3: a llama whose every fourth layer turns nothing.

Sources: transformers' SmolLM3Config; llama.cpp's `smollm3`.
"""

from jaxinfer.config import ModelConfig
from jaxinfer.errors import ConfigError
from jaxinfer.model.families import llama
from jaxinfer.model.families.fields import MAX_LAYERS, Fields
from jaxinfer.model.families.sizes import Shapes, Windows, windows_by_type

_DEFAULTS = {"num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 32_768}
_THETA = 2_000_000.0
_INTERVAL = 4


def smollm3_from_hf(fields: Fields) -> ModelConfig:
    """SmolLM3ForCausalLM. In `no_rope_layers` a 1 stands for a layer that turns, a 0 for one that does not."""
    fields = fields.with_defaults(_DEFAULTS)
    still = _still_layers(fields, fields.whole("num_hidden_layers", high=MAX_LAYERS))
    return llama.dense_from_hf(fields, "smollm3", theta=_THETA, no_rope=still, windows=_windows(fields, still))


def _still_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    interval = fields.whole("no_rope_layer_interval", _INTERVAL)
    turns = fields.get("no_rope_layers")
    if turns is None:
        return _every(interval, layers)
    if not isinstance(turns, list) or len(turns) < layers or not all(turn in (0, 1) for turn in turns):
        raise ConfigError(
            f"{fields.where}: no_rope_layers is {turns!r:.80}; expected 0 or 1 for each of {layers} layers"
        )
    return tuple(layer for layer in range(layers) if not turns[layer])


def _every(interval: int, layers: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(layers) if (layer + 1) % interval == 0)


def _windows(fields: Fields, still: tuple[int, ...]) -> Windows:
    """Only with `use_sliding_window`, and then, where `layer_types` does not say, on the layers that turn nothing."""
    on, window = fields.flag("use_sliding_window", False), fields.get("sliding_window")
    if not on or window is None:
        fields.get("layer_types")  # says nothing then: transformers masks by it only where windows are in use
        return ()
    window, layers = fields.whole("sliding_window"), fields.whole("num_hidden_layers", high=MAX_LAYERS)
    by_type = windows_by_type(fields, layers, window)
    return by_type if by_type is not None else tuple(window if layer in still else None for layer in range(layers))


def smollm3_from_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    """llama.cpp's `smollm3`; that every fourth layer turns nothing stands in no field."""
    still = _every(_INTERVAL, fields.whole("smollm3.block_count", high=MAX_LAYERS))
    return llama.dense_from_gguf(fields, shapes, "smollm3", "smollm3", no_rope=still)
