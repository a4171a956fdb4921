"""Small checkpoints in each format, of the same random weights, so that formats can be compared with each other."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel

Weights = Mapping[str, Any]
"""Arrays by name; for GGUF files also `(array, GGMLQuantizationType)`."""
VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 259, 32, 4, 2, 16, 32, 2

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": 8,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": MLP,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_NORMS = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}


def hf_config(family: str, **changes: Any) -> dict[str, Any]:
    """A `config.json`; a change to None leaves the field out."""
    merged = {**SIZES, **CONFIGS[family], **changes}
    return {name: value for name, value in merged.items() if value is not None}


def hf_weights(family: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    if family == "llama":
        shapes["lm_head.weight"] = (VOCAB, WIDTH)
    for i in range(LAYERS):
        for name, shape in block_shapes(family).items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def block_shapes(family: str) -> dict[str, tuple[int, ...]]:
    gemma = {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)} if family == "gemma3" else {}
    return {
        "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
        "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
        "mlp.gate_proj": (MLP, WIDTH),
        "mlp.up_proj": (MLP, WIDTH),
        "mlp.down_proj": (WIDTH, MLP),
        "input_layernorm": (WIDTH,),
        **dict.fromkeys(GGUF_NORMS[family], (WIDTH,)),
        **gemma,
    }


def byte_tokens() -> list[str]:
    """Three control tokens and the 256 bytes, as byte-level BPE spells them."""
    return ["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet())]


def write_hf(directory: Path, config: Mapping[str, Any], shards: Mapping[str, Mapping[str, np.ndarray]]) -> Path:
    """A Hugging Face directory; `shards` maps file names to tensors, an index is written where there are several."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    for name, tensors in shards.items():
        save_file(dict(tensors), directory / name)
    if list(shards) != ["model.safetensors"]:
        weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    vocabulary = {token: index for index, token in enumerate(byte_tokens())}
    special = [{"id": i, "content": t, "special": True, **PLAIN} for t, i in list(vocabulary.items())[:3]]
    tokenizer = {
        "added_tokens": special,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return directory


def gguf_tensors(family: str, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights as llama.cpp's converter writes them: other names, llama's q and k rows paired, gemma's norms + 1."""
    names = {**GGUF_NAMES, **GGUF_NORMS[family]}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    converted = {}
    for name, value in weights.items():
        stem = name.removesuffix(".weight")
        layer, _, inner = stem.removeprefix("model.layers.").partition(".")
        new = top[stem] if stem in top else f"blk.{layer}.{names[inner]}"
        if family == "gemma3" and "norm" in stem:
            value = value + 1
        if family == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
            halves = value.reshape(-1, 2, HEAD_DIM // 2, WIDTH)
            value = np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(value.shape)
        converted[f"{new}.weight"] = value
    return converted


def gguf_fields(family: str, **changes: Any) -> dict[str, Any]:
    """The metadata of a GGUF file; a change to None leaves the field out. Dots are spelled `__` in `changes`."""
    fields = {
        "block_count": LAYERS,
        "context_length": 64,
        "embedding_length": WIDTH,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": CONFIGS[family]["rope_theta"],
        **({"attention.sliding_window": 8} if family == "gemma3" else {}),
    }
    whole = {f"{family}.{name}": value for name, value in fields.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": byte_tokens(),
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 256],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    whole["tokenizer.ggml.tokens"][-1] = "ab"
    merged = whole | {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in merged.items() if value is not None}


def write_gguf(path: Path, family: str, tensors: Mapping[str, np.ndarray], fields: Mapping[str, Any]) -> Path:
    """A GGUF file by the gguf package; tensors stay float32 unless they are `(array, GGMLQuantizationType)`."""
    writer = gguf.GGUFWriter(path, family)
    for name, value in fields.items():
        add_field(writer, name, value)
    for name, value in tensors.items():
        array, kind = value if isinstance(value, tuple) else (value, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    match value:
        case str():
            writer.add_string(name, value)
        case float():
            writer.add_float32(name, value)
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case _:
            writer.add_array(name, value)


def hf_model(directory: Path, family: str = "llama", weights: Weights | None = None, **config: Any) -> str:
    """The reference of a Hugging Face directory of one file, in the new folder `hf`."""
    tensors = hf_weights(family) if weights is None else weights
    return str(write_hf(directory / "hf", hf_config(family, **config), {"model.safetensors": tensors}))


def gguf_model(directory: Path, family: str = "llama", weights: Weights | None = None, **fields: Any) -> str:
    """The reference of the GGUF file `m.gguf`."""
    tensors = gguf_tensors(family, hf_weights(family)) if weights is None else weights
    return str(write_gguf(directory / "m.gguf", family, tensors, gguf_fields(family, **fields)))
