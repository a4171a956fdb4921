"""The decoder again, in float64 numpy: one sequence, no cache, loops over heads. Shares no code with the model.

Written from the papers and from what Hugging Face's checkpoints mean, so that a mistake has to be made twice to pass.
"""

import math
from typing import Any

import numpy as np

from jaxinfer.config import ModelConfig

from .numpy_rope import turn

Tree = Any


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def weigh(scores: np.ndarray, config: ModelConfig, sink: float | None) -> np.ndarray:
    """Softmax of one query's scores; a sink is one score more, whose weight goes nowhere."""
    if config.attention_softcap is not None:
        scores = config.attention_softcap * np.tanh(scores / config.attention_softcap)
    powers = np.exp(scores)
    return powers / (powers.sum() + (0.0 if sink is None else np.exp(sink)))


def first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def norm_all(x: np.ndarray, weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    """The heads of each token normed together."""
    return norm(x.reshape(len(x), -1), weight.reshape(-1), config.norm_eps).reshape(x.shape)


def attention(x: np.ndarray, layer: int, tree: Tree, config: ModelConfig) -> np.ndarray:
    length, group, window = len(x), config.heads // config.kv_heads, config.window(layer)
    rope = config.layer_rope(layer)
    mixed = np.zeros((length, config.kv_heads, group, config.head_dim))
    projected = np.einsum("tw,kjcw->tkjc", x, tree["qkv"])
    if config.attention_bias:
        projected += tree["qkv_bias"]
    queries, keys, values = projected[:, :, :group], projected[:, :, group], projected[:, :, group + 1]
    if config.qk_norm == "head":
        queries, keys = norm(queries, tree["q_norm"], config.norm_eps), norm(keys, tree["k_norm"], config.norm_eps)
    if config.qk_norm == "all":
        flat = [(y.reshape(length, -1), tree[name].reshape(-1)) for y, name in ((queries, "q_norm"), (keys, "k_norm"))]
        queries, keys = (
            norm(*pair, config.norm_eps).reshape(y.shape) for pair, y in zip(flat, (queries, keys), strict=True)
        )
    for head in range(config.kv_heads):
        turned = (
            keys[:, head]
            if rope is None
            else np.stack([turn(key, i, rope, config.context) for i, key in enumerate(keys[:, head])])
        )
        for j in range(group):
            sink = tree["sinks"][head, j] if config.sinks else None
            for i in range(length):
                first, query = first_seen(i, window), queries[i, head, j]
                query = query if rope is None else turn(query, i, rope, config.context)
                weights = weigh(turned[first : i + 1] @ query * config.query_scale, config, sink)
                mixed[i, head, j] = weights @ values[first : i + 1, head]
    added = np.einsum("tkgc,wkgc->tw", mixed, tree["out"])
    return added + tree["out_bias"] if config.output_bias else added


def latent_attention(x: np.ndarray, layer: int, tree: Tree, config: ModelConfig) -> np.ndarray:
    """Every token's latent expanded to each head's key and value, as the paper writes it."""
    latent, rope, window = config.latent, config.layer_rope(layer), config.window(layer)
    assert latent is not None
    assert rope is not None
    if latent.query_rank is None:
        queries = np.einsum("tw,hcw->thc", x, tree["query"])
    else:
        queries = np.einsum("tq,hcq->thc", norm(x @ tree["q_down"].T, tree["q_norm"], latent.norm_eps), tree["q_up"])
    down = x @ tree["kv_down"].T
    content = norm(down[:, : latent.rank], tree["kv_norm"], latent.norm_eps)
    shared = np.stack([turn(key, i, rope, config.context) for i, key in enumerate(down[:, latent.rank :])])
    mixed = np.zeros((len(x), config.heads, latent.value_dim))
    for head in range(config.heads):
        keys = np.concatenate([content @ tree["key_up"][head].T, shared], axis=-1)
        values = content @ tree["value_up"][head].T
        for i in range(len(x)):
            still, turning = np.split(queries[i, head], [latent.content_dim])
            first, query = first_seen(i, window), np.concatenate([still, turn(turning, i, rope, config.context)])
            weights = weigh(keys[first : i + 1] @ query * config.query_scale, config, None)
            mixed[i, head] = weights @ values[first : i + 1]
    return np.einsum("thv,whv->tw", mixed, tree["out"])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def activate(gate: np.ndarray, up: np.ndarray, kind: str) -> np.ndarray:
    if kind == "silu":
        return gate * sigmoid(gate) * up
    if kind == "gelu":
        return 0.5 * gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))) * up
    if kind == "swiglu_clamped":
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        return gate * sigmoid(1.702 * gate) * (up + 1)
    return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def mlp(x: np.ndarray, tree: Tree, config: ModelConfig) -> np.ndarray:
    gate, up = x @ tree["gate_up"][0].T, x @ tree["gate_up"][1].T
    if config.mlp_bias:
        gate, up = gate + tree["gate_up_bias"][0], up + tree["gate_up_bias"][1]
    added = activate(gate, up, config.activation) @ tree["down"].T
    return added + tree["down_bias"] if config.mlp_bias else added


def experts(x: np.ndarray, tree: Tree, config: ModelConfig) -> np.ndarray:
    """Token by token: rank the experts, run the chosen ones, add what they say."""
    how, added = config.experts, np.zeros_like(x)
    assert how is not None
    for i, token in enumerate(x):
        logits = tree["router"] @ token + (tree["router_bias"] if how.router_bias else 0.0)
        scores = sigmoid(logits) if how.scoring == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
        ranked = scores + (tree["selection_bias"] if how.selection_bias else 0.0)
        groups = np.array_split(np.arange(how.count), how.groups)
        best = sorted(groups, key=lambda group: -np.sort(ranked[group])[-2:].sum())[: how.active_groups]
        chosen = sorted(np.concatenate(best), key=lambda expert: -ranked[expert])[: how.active]
        total = scores[chosen].sum() if how.normalised else 1.0
        for expert in chosen:
            own = {name: tree[name][expert] for name in tree if name.startswith(("gate_up", "down"))}
            added[i] += scores[expert] / total * how.scale * mlp(token, own, config)
    return added + mlp(x, tree["shared"], config) if how.shared_width else added


def decode(tokens: list[int], params: Tree, config: ModelConfig) -> np.ndarray:
    """Logits after every token, [t, v]."""
    x = np.array(params["embedding"], np.float64)[tokens] * config.embedding_scale
    attend = latent_attention if config.latent else attention
    for layer in range(config.layers):
        tree = params[f"block_{layer}"]
        sparse = config.experts is not None and layer not in config.dense_layers
        for part, run in (
            ("attention", lambda y, tree=tree, layer=layer: attend(y, layer, tree["attention"], config)),
            ("mlp", lambda y, tree=tree, run=experts if sparse else mlp: run(y, tree[run.__name__], config)),
        ):
            added = run(norm(x, tree[f"{part}_norm"], config.norm_eps) if config.pre_norms else x)
            if config.post_norms:
                added = norm(added, tree[f"{part}_post_norm"], config.norm_eps)
            x = x + added * config.residual_scale
    hidden = norm(x, params["final_norm"], config.norm_eps)
    logits = hidden @ np.array(params["embedding" if config.tied_head else "head"], np.float64).T * config.logit_scale
    cap = config.logit_softcap
    return logits if cap is None else cap * np.tanh(logits / cap)
