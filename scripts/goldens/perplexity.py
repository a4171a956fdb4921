"""What transformers (float32) makes of tests/data/eval/alice.txt: windows of Hugging Face's recipe, and their losses.

A BOS stands in front of every window where the tokenizer adds one.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer, PreTrainedModel  # pyright: ignore[reportMissingImports]

from .greedy import load_gguf
from .recipe import GOLDEN

TEXT = GOLDEN.parent / "data" / "eval" / "alice.txt"
CONTEXT, STRIDE, TOKENS = 512, 256, 1_000


@torch.inference_mode()
def windows(model: PreTrainedModel, ids: list[int], opening: list[int]) -> Iterator[dict[str, Any]]:
    """Where each window lies in `ids`, how many tokens it scores, and their mean loss."""
    scored = 0
    for begin in range(0, len(ids), STRIDE):
        end = min(begin + CONTEXT - len(opening), len(ids))
        inputs = torch.tensor([opening + ids[begin:end]])
        labels = inputs.clone()
        labels[:, : inputs.shape[1] - (end - scored)] = -100  # what was scored before, and the BOS
        count = int((labels[:, 1:] != -100).sum())  # the model moves the labels by one
        yield {"begin": begin, "end": end, "scored": count, "loss": float(model(inputs, labels=labels).loss)}
        scored = end
        if end == len(ids):
            return


def measure(path: Path) -> dict[str, Any]:
    """One model's ids and windows."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = TEXT.read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False).input_ids[:TOKENS]
    opening = tokenizer("", add_special_tokens=True).input_ids
    found = list(windows(load_gguf(path), ids, opening))
    print(path.name, opening, *found, sep="\n", flush=True)
    return {"file": path.name, "opening": opening, "ids": ids, "windows": found}


def write(given: Mapping[str, Path]) -> None:
    """Write tests/golden/perplexity.json: each of the GGUF files, by the name that it has there."""
    golden = {
        "made_by": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "text": TEXT.name,
        "context": CONTEXT,
        "stride": STRIDE,
        "models": {name: measure(path) for name, path in given.items()},
    }
    (GOLDEN / "perplexity.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")
