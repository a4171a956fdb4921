"""The decoder again, in float64 numpy: one sequence, no cache, loops over heads. Shares no code with the model.

Written from the papers and from what Hugging Face's checkpoints mean, so that a mistake has to be made twice to pass.
"""

import math
from typing import Any

import numpy as np

from jaxinfer.config import ModelConfig, RopeConfig

Tree = Any


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def wavelengths(rope: RopeConfig, head_dim: int) -> list[float]:
    """Positions per full turn of each pair; stretching is easier to read off wavelengths than off frequencies."""
    plain = [2 * math.pi * rope.theta ** (2 * i / head_dim) for i in range(head_dim // 2)]
    if rope.kind == "linear":
        return [wave * rope.factor for wave in plain]
    if rope.kind == "llama3":
        return [_llama3_wavelength(rope, wave) for wave in plain]
    return plain


def _llama3_wavelength(rope: RopeConfig, wave: float) -> float:
    longest_kept = rope.original_context / rope.high_freq_factor
    shortest_stretched = rope.original_context / rope.low_freq_factor
    if wave < longest_kept:
        return wave
    if wave > shortest_stretched:
        return wave * rope.factor
    smooth = (rope.original_context / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return 1 / ((1 - smooth) / (rope.factor * wave) + smooth / wave)


def turn(x: np.ndarray, position: int, rope: RopeConfig) -> np.ndarray:
    """One head at one position: pair i, seen as a complex number, turns by 2 pi position / wavelength."""
    half = len(x) // 2
    angles = np.array([2 * math.pi * position / wave for wave in wavelengths(rope, len(x))])
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag])


def attention(x: np.ndarray, layer: int, tree: Tree, config: ModelConfig) -> np.ndarray:
    length, group, window = len(x), config.heads // config.kv_heads, config.window(layer)
    rope = config.layer_rope(layer)
    mixed = np.zeros((length, config.kv_heads, group, config.head_dim))
    for head in range(config.kv_heads):
        projected = np.einsum("tw,jcw->jtc", x, tree["qkv"][head])
        if config.attention_bias:
            projected += tree["qkv_bias"][head][:, None]
        queries, keys, values = list(projected[:group]), projected[group], projected[group + 1]
        if config.qk_norm:
            queries = [norm(query, tree["q_norm"], config.norm_eps) for query in queries]
            keys = norm(keys, tree["k_norm"], config.norm_eps)
        keys = np.stack([turn(key, i, rope) for i, key in enumerate(keys)])
        for j, query in enumerate(queries):
            for i in range(length):
                first = 0 if window is None else max(0, i - window + 1)
                scores = keys[first : i + 1] @ turn(query[i], i, rope) * config.query_scale
                if config.attention_softcap is not None:
                    scores = config.attention_softcap * np.tanh(scores / config.attention_softcap)
                weights = np.exp(scores - scores.max())
                mixed[i, head, j] = weights / weights.sum() @ values[first : i + 1]
    added = np.einsum("tkgc,wkgc->tw", mixed, tree["out"])
    return added + tree["out_bias"] if config.output_bias else added


def mlp(x: np.ndarray, tree: Tree, config: ModelConfig) -> np.ndarray:
    gate, up = x @ tree["gate_up"][0].T, x @ tree["gate_up"][1].T
    if config.activation == "silu":
        gate = gate / (1 + np.exp(-gate))
    else:
        gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (gate * up) @ tree["down"].T


def decode(tokens: list[int], params: Tree, config: ModelConfig) -> np.ndarray:
    """Logits after every token, [t, v]."""
    x = np.array(params["embedding"], np.float64)[tokens] * config.embedding_scale
    for layer in range(config.layers):
        tree = params[f"block_{layer}"]
        for part, run in (
            ("attention", lambda y, tree=tree, layer=layer: attention(y, layer, tree["attention"], config)),
            ("mlp", lambda y, tree=tree: mlp(y, tree["mlp"], config)),
        ):
            added = run(norm(x, tree[f"{part}_norm"], config.norm_eps))
            if config.post_norms:
                added = norm(added, tree[f"{part}_post_norm"], config.norm_eps)
            x = x + added
    hidden = norm(x, params["final_norm"], config.norm_eps)
    logits = hidden @ np.array(params["embedding" if config.tied_head else "head"], np.float64).T
    cap = config.logit_softcap
    return logits if cap is None else cap * np.tanh(logits / cap)
