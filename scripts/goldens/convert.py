"""Writes model.gguf beside each tiny model, by llama.cpp's own converter.

Needs a checkout of llama.cpp (its Python files are enough); `made_by.json` names the commit. One thing of it is
replaced from outside: the vocabulary is always written as that of a byte-level tokenizer of the kind "gpt-2", where
the converter would ask for a SentencePiece model or refuse a tokenizer whose hash it does not know.

Where such a file cannot say all of a configuration, `gguf_logits.npz` holds `ids` and `logits` of the model that it
does say, from the fields in a recipe's `gguf`; the file's logits are those of `logits.npz` elsewhere.
"""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from safetensors import safe_open

from . import checks
from .recipe import GOLDEN, Tiny
from .tiny import TINY, build, ids_of


def convert(name: str, llama_cpp: Path, commit: str) -> None:
    """Write tests/golden/NAME/model.gguf and, where its meaning is another, gguf_logits.npz."""
    tiny, directory = TINY[name](), GOLDEN / name
    if tiny.gguf is None:
        return
    path = directory / "model.gguf"
    run_converter(directory, path, llama_cpp)
    reader = gguf.GGUFReader(path)
    if tiny.gguf:
        write_logits(tiny, directory)
    if tiny.packed:
        check_experts(reader, directory)
    made_by = json.loads((directory / "made_by.json").read_text())
    made_by["gguf"] = f"llama.cpp {commit}, convert_hf_to_gguf.py --outtype f32, vocabulary written as gpt-2"
    (directory / "made_by.json").write_text(json.dumps(made_by) + "\n")
    print(name, path.stat().st_size, reader.fields["general.architecture"].contents(), flush=True)


def run_converter(directory: Path, path: Path, llama_cpp: Path) -> None:
    """Run the converter; its messages are shown where it fails."""
    command = [sys.executable, Path(__file__).with_name("llama_cpp.py"), llama_cpp, directory, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def write_logits(tiny: Tiny, directory: Path) -> None:
    """`gguf_logits.npz`: what the model that the file does say gives."""
    ids = ids_of(tiny)
    model = checks.rebuilt(build(tiny), tiny.gguf or {})
    logits = checks.logits_of(model, torch.tensor(ids.astype(np.int64)))
    np.savez_compressed(directory / "gguf_logits.npz", ids=ids, logits=logits.numpy())


def check_experts(reader: gguf.GGUFReader, directory: Path) -> None:
    """llama.cpp's blocks of four bits decode to what transformers decodes from the hub's."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # pyright: ignore[reportMissingImports]

    found = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    with safe_open(directory / "model.safetensors", "pt") as file:
        for name in (name for name in file.keys() if name.endswith("_blocks")):  # noqa: SIM118 (no dict)
            stored = convert_moe_packed_tensors(
                file.get_tensor(name), file.get_tensor(name.replace("blocks", "scales"))
            )
            weight, layer = stored.float().transpose(1, 2).numpy(), name.split(".")[2]
            parts = {"down": weight} if "down" in name else {"gate": weight[:, ::2], "up": weight[:, 1::2]}
            for part, expected in parts.items():
                np.testing.assert_array_equal(found[f"blk.{layer}.ffn_{part}_exps.weight"], expected, err_msg=name)
