"""Make tests/golden: what independent implementations (transformers on torch, float32, CPU; llama.cpp) answer.

Needs torch, transformers, gguf and nothing of jaxinfer, so that a fault of ours cannot hide in the goldens:

    python scripts/make_goldens.py greedy smollm2 SmolLM2-135M-Instruct.Q4_1.gguf
    python scripts/make_goldens.py greedy gemma3_270m gemma-3-270m-q4_k_m.gguf
    python scripts/make_goldens.py tiny
    python scripts/make_goldens.py gguf --llama-cpp ~/llama.cpp --commit 0c1e57098bba43ac29e6e3b677cdceebdd22334f
    python scripts/make_goldens.py ropes
    python scripts/make_goldens.py perplexity smollm2=SmolLM2-135M-Instruct.Q4_1.gguf gemma3_270m=gemma.gguf
    python scripts/make_goldens.py activations

`greedy` takes a few minutes. `tiny` makes a Hugging Face directory for each small random model, with its logits;
`gguf` then puts beside each the file that llama.cpp's converter makes of it; both take the names of some models too.
`ropes` makes the cosines and sines of every kind of rotary embedding. `perplexity` scores tests/data/eval/alice.txt;
`activations` records what the parts of a tiny model make of a sequence.
"""

import argparse
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from goldens import activations, convert, greedy, perplexity, ropes, tiny


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("greedy")
    command.add_argument("name", help="of the file in tests/golden")
    command.add_argument("path", type=Path, help="of the .gguf file")
    command = commands.add_parser("tiny")
    command.add_argument("names", nargs="*", default=list(tiny.TINY), help="of models; all where none is given")
    command = commands.add_parser("gguf")
    command.add_argument("names", nargs="*", default=list(tiny.TINY), help="of models; all where none is given")
    command.add_argument("--llama-cpp", type=Path, required=True, help="a checkout of llama.cpp")
    command.add_argument("--commit", required=True, help="of that checkout, to be written down")
    commands.add_parser("ropes")
    commands.add_parser("activations")
    command = commands.add_parser("perplexity")
    command.add_argument("models", nargs="+", metavar="NAME=FILE", help="a name, and the path of its .gguf file")
    return parser.parse_args()


def run(given: argparse.Namespace) -> None:
    """Do what the command line says."""
    if given.command == "greedy":
        greedy.greedy(given.name, given.path)
    elif given.command == "ropes":
        ropes.write()
    elif given.command == "activations":
        activations.write()
    elif given.command == "perplexity":
        models = [model.split("=", 1) for model in given.models]
        perplexity.write({name: Path(path) for name, path in models})
    for name in getattr(given, "names", ()):
        if given.command == "tiny":
            tiny.write(name)
        else:
            convert.convert(name, given.llama_cpp, given.commit)


if __name__ == "__main__":
    torch.set_num_threads(2)
    run(arguments())
