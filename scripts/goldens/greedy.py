"""Greedy continuations of real models: 20 prompts, 64 ids each, and at each how far the best logit is above the next.

Knows llama's and gemma3's GGUF files: transformers' reading of one is compared with gguf's own decoding before use.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from .recipe import GOLDEN

STEPS = 64
SHORT = 80  # tokens; prompts up to here share one padded batch

FOX = "The quick brown fox jumps over the lazy dog, and then it sleeps in the sun. "
PROSE = (
    "It was a bright morning when the harbour master first saw the ship. She came in slowly, her sails torn, and "
    "nobody stood at the wheel. By noon the whole town had gathered on the quay. Some said that she was the Margaret, "
    "lost nine years ago on the way to Lisbon; others laughed at them. "
)
PROMPTS = (
    "The",
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Q: What is the boiling point of water at sea level?\nA:",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x, axis=-1):\n",
    "SELECT name, COUNT(*) FROM orders\nWHERE",
    "<html>\n<head>\n<title>My page</title>",
    "안녕하세요. 오늘은 날씨가",
    "대한민국의 수도는 서울이고, 일본의 수도는",
    "I love pizza 🍕 and sushi 🍣, but my favourite food is",
    "🙂🙃🙂🙃🙂",
    "1, 2, 3, 4, 5, 6,",
    "Shopping list:\n- apples\n- bread\n- milk\n-",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "Translate English to German.\nsea otter => Seeotter\ncheese =>",
    PROSE,
    PROSE * 4 + "The harbour master",
    "\n".join(f"{n}. The square of {n} is {n * n}." for n in range(1, 24)),
    "".join(f"Train {n} leaves platform {n % 9 + 1} at {n % 12 + 1} o'clock. {FOX}" for n in range(26)),
)


def load_gguf(path: Path) -> PreTrainedModel:
    """The model as transformers builds it, after its weights were compared with gguf's own decoding of the file."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    check_config(model.config)
    check_weights(model, gguf.GGUFReader(path))
    return model


def check_config(config: PretrainedConfig) -> None:
    """What a gemma3 file does not say must be what the paper says (arXiv 2503.19786)."""
    if config.model_type != "gemma3_text":
        return
    thetas = {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
    assert thetas == {"full_attention": 1e6, "sliding_attention": 1e4}, thetas
    assert config.sliding_window == 512, config.sliding_window
    kinds = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(config.num_hidden_layers)]
    assert config.layer_types == kinds, config.layer_types
    assert config.tie_word_embeddings
    assert config.query_pre_attn_scalar == 256, config.query_pre_attn_scalar


HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def check_weights(model: PreTrainedModel, reader: gguf.GGUFReader) -> None:
    """Every tensor, decoded by gguf, is the model's, but for llama's order of rows and gemma's norms minus 1."""
    gemma = model.config.model_type == "gemma3_text"
    ffn_norm = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    weights = model.state_dict()
    for tensor in reader.tensors:
        role = tensor.name.removesuffix(".weight").split(".")
        inner = ffn_norm if role[-1] == "ffn_norm" else HF_NAMES[role[-1]]
        name = f"model.layers.{role[1]}.{inner}.weight" if role[0] == "blk" else f"{inner}.weight"
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        if gemma and role[-1].endswith("norm"):
            expected = expected - 1
        if not gemma and role[-1] in ("attn_q", "attn_k"):
            pairs = expected.reshape(-1, model.config.head_dim // 2, 2, expected.shape[-1])
            expected = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(expected.shape)
        np.testing.assert_array_equal(weights.pop(name).numpy(), expected, err_msg=name)
    assert set(weights) <= {"lm_head.weight"}, set(weights)


@torch.inference_mode()
def continue_greedily(model: PreTrainedModel, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """STEPS further ids of each prompt, whatever they are (no end of text), and at each the gap of the two best logits.

    Shorter prompts are padded on the left, masked, and keep their own positions.
    """
    longest = max(map(len, prompts))
    feed = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    tokens, gaps, cache = [], [], None
    for _ in range(STEPS):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -feed.shape[1] :]
        out = model(feed, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        logits, cache = out.logits[:, -1], out.past_key_values
        best = logits.topk(2).values
        tokens.append(logits.argmax(-1))
        gaps.append(best[:, 0] - best[:, 1])
        feed, mask = tokens[-1][:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], dim=-1)
    return torch.stack(tokens, dim=1), torch.stack(gaps, dim=1)


def check_padding(model: PreTrainedModel, ids: list[int], tokens: torch.Tensor, gaps: torch.Tensor) -> None:
    """A padded prompt continues as it does alone, up to the first tie."""
    alone, _ = continue_greedily(model, [ids])
    tied = (gaps < 1e-3).nonzero()
    end = int(tied[0]) if len(tied) else STEPS
    assert torch.equal(alone[0, :end], tokens[:end]), (alone[0], tokens)


def greedy(name: str, path: Path) -> None:
    """Write tests/golden/NAME.json: short prompts run as one batch, each long one alone."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model, ids = load_gguf(path), [tokenizer(text).input_ids for text in PROMPTS]
    short = [index for index, prompt in enumerate(ids) if len(prompt) <= SHORT]
    lines: dict[int, str] = {}
    for group in [short, *([index] for index in range(len(ids)) if index not in short)]:
        tokens, gaps = continue_greedily(model, [ids[index] for index in group])
        if len(group) > 1:
            check_padding(model, ids[group[0]], tokens[0], gaps[0])
        for row, index in enumerate(group):
            lines[index] = json.dumps(
                {
                    "text": PROMPTS[index],
                    "ids": ids[index],
                    "continuation": tokens[row].tolist(),
                    "gaps": [round(gap, 6) for gap in gaps[row].tolist()],
                },
                ensure_ascii=False,
            )
            print(len(ids[index]), repr(tokenizer.decode(tokens[row]))[:100], float(gaps[row].min()), flush=True)
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    head = json.dumps({"file": path.name, "made_by": made_by})[:-1]
    body = ",\n".join(lines[index] for index in sorted(lines))
    (GOLDEN / f"{name}.json").write_text(f'{head}, "prompts": [\n{body}\n]}}\n', encoding="utf-8")
