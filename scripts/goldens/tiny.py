"""Writes the tiny random models: a Hugging Face directory each, with the logits of one sequence."""

import json
import re
from pathlib import Path

import numpy as np
import safetensors.torch
import tokenizers
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, PreTrainedModel  # pyright: ignore[reportMissingImports]

from . import checks
from .dense import DENSE
from .experts import SPARSE
from .recipe import GOLDEN, TOKENS, VOCAB, Tiny

TINY = {make.__name__: make for make in (*DENSE, *SPARSE)}


def write(name: str) -> None:
    """Write tests/golden/NAME, after everything that `checks` asks for holds, and read it again."""
    tiny = TINY[name]()
    model = build(tiny)
    ids = torch.tensor(ids_of(tiny).astype(np.int64))
    packed = tiny.packed(model) if tiny.packed else None
    checks.check_switches(tiny, model, ids)
    margin = checks.check_margins(model, ids)
    directory = GOLDEN / name
    model.save_pretrained(directory)
    if packed:
        safetensors.torch.save_file(dict(packed), directory / "model.safetensors", {"format": "pt"})
    write_config(tiny, directory)
    write_tokenizer(directory)
    write_logits(tiny, model, directory)
    with safetensors.safe_open(directory / "model.safetensors", "np") as file:
        checks.check_names(tiny, file.keys())
    check_directory(tiny, model, directory, ids)
    print(name, sum(file.stat().st_size for file in directory.iterdir()), f"margin {margin:.4f}", flush=True)


def build(tiny: Tiny) -> PreTrainedModel:
    """The model, in float32, with weights from the recipe's seed."""
    transformers.set_seed(tiny.seed)
    model = AutoModelForCausalLM.from_config(tiny.config, dtype=torch.float32).eval()
    randomise(model, tiny)
    return model


def randomise(model: PreTrainedModel, tiny: Tiny) -> None:
    """Weights large enough for every part to matter: biases and norms too, which are made as zeros and ones."""
    generator = torch.Generator().manual_seed(tiny.seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        for pattern, factor in tiny.louder.items():
            noise = noise * factor if re.search(pattern, name) else noise
        if "norm" in name:
            weight.data = weight.data + 0.3 * noise
        elif weight.ndim == 1 or name.endswith("bias"):
            weight.data = 0.5 * noise
        else:
            weight.data = noise * (2.0 / weight.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.tie_weights()


def ids_of(tiny: Tiny) -> np.ndarray:
    """The sequence of token ids."""
    return np.random.default_rng(tiny.seed).integers(0, VOCAB, TOKENS, dtype=np.int32)


def write_config(tiny: Tiny, directory: Path) -> None:
    """`config.json` as the recipe has it written, and what made the directory."""
    path = directory / "config.json"
    path.write_text(json.dumps(tiny.written(json.loads(path.read_text())), indent=2, sort_keys=True) + "\n")
    made_by = {"logits": f"transformers {transformers.__version__}, torch {torch.__version__}, float32"}
    (directory / "made_by.json").write_text(json.dumps(made_by) + "\n")


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer: 3 control tokens, the 256 bytes, and as many merges as the vocabulary has room for."""
    control, merges = ["<unk>", "<s>", "</s>"], [("Ġ", "t"), ("h", "e"), ("i", "n"), ("Ġt", "he"), ("e", "r")]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*control, *alphabet, *("".join(pair) for pair in merges)]
    assert len(tokens) == VOCAB
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(control)
    tokenizer.save(str(directory / "tokenizer.json"))
    written = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(written))


def write_logits(tiny: Tiny, model: PreTrainedModel, directory: Path) -> None:
    """`logits.npz`: `ids` and `logits`, and `short_logits` of a first part run alone where the recipe asks for it."""
    ids = ids_of(tiny)
    run = torch.tensor(ids.astype(np.int64))
    found = {"ids": ids, "logits": checks.logits_of(model, run).numpy()}
    if tiny.short:
        found["short_logits"] = checks.logits_of(model, run[: tiny.short]).numpy()
        longer = np.abs(found["logits"][: tiny.short] - found["short_logits"]).max()
        assert longer > checks.MOVES, f"the longer sequence moves the first logits by {longer}"
    np.savez_compressed(directory / "logits.npz", **found)


def check_directory(tiny: Tiny, model: PreTrainedModel, directory: Path, ids: torch.Tensor) -> None:
    """What was written is read by transformers as the model that gave the logits."""
    options = {"dtype": torch.float32}
    if tiny.packed:
        options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(directory, **options).eval().float()
    torch.testing.assert_close(checks.logits_of(read, ids), checks.logits_of(model, ids), rtol=0, atol=2e-6)
