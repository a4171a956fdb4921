"""Our own directories: weights written by Orbax and restored straight to their sharding, the rest as plain files.

Knows: the layout, which is
    jaxinfer.json        format number, name, configuration, end-of-text ids, recommended sampling
    params/              the parameter tree, as `orbax_params` keeps it
    tokenizer*           the tokenizer's own files
    chat_template.jinja  where there is one
Holds no pickle, and reading writes nothing.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.files import CHAT_TEMPLATE, chat_template, eos_ids, read_json
from jaxinfer.checkpoint.fill import Progress, Shardings
from jaxinfer.checkpoint.generation import checked_sampling
from jaxinfer.checkpoint.orbax_params import read_param_structs, restore_params, save_params
from jaxinfer.config import ExpertsConfig, LatentConfig, ModelConfig, QuantizeName, RopeConfig
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.text.tokenizer import from_sentencepiece, from_tokenizer_json, load_tokenizer

MANIFEST = "jaxinfer.json"
_PARAMS = "params"
_FORMAT = 1
_PARTS = {"rope": RopeConfig, "local_rope": RopeConfig, "experts": ExpertsConfig, "latent": LatentConfig}


def save_orbax(checkpoint: Checkpoint, directory: Path) -> None:
    """Write `checkpoint` into the new directory `directory`.

    It appears there when it is complete, and not before; of a failure nothing stays. Raises CheckpointError where
    something is already there.
    """
    directory = directory.absolute()
    if directory.exists():
        raise CheckpointError(f"{directory.name} already exists; choose a new directory")
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed run may have left
    partial.mkdir(parents=True)
    try:
        _write(checkpoint, partial)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write(checkpoint: Checkpoint, directory: Path) -> None:
    save_params(directory / _PARAMS, checkpoint.params)
    for name, data in checkpoint.tokenizer.files().items():
        (directory / name).write_bytes(data)
    if checkpoint.chat_template is not None:
        (directory / CHAT_TEMPLATE).write_text(checkpoint.chat_template, encoding="utf-8")
    (directory / MANIFEST).write_text(json.dumps(_manifest(checkpoint), indent=1), encoding="utf-8")


def save_trained(name: str, config: ModelConfig, params: Any, tokenizer_file: Path, directory: Path) -> None:
    """Write a model that was trained here; `tokenizer_file` is its SentencePiece model or `tokenizer.json`.

    `params` is the plain nested dict that `init_params` gives. Raises CheckpointError as `save_orbax` does.
    """
    read = from_tokenizer_json if tokenizer_file.suffix == ".json" else from_sentencepiece
    tokenizer = read(tokenizer_file)
    save_orbax(Checkpoint(name, config, params, tokenizer, None, tokenizer.eos_ids), directory)


def load_orbax(
    directory: Path,
    *,
    dtype: str,
    quantize: QuantizeName | None = None,
    shardings: Shardings | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """The checkpoint that `save_orbax` wrote into `directory`, each leaf restored to its dtype and sharding.

    Raises CheckpointError where a file is missing or damaged, or a leaf is not the one the configuration asks for,
    ConfigError where `quantize` cannot be had: see `restore_params`.
    """
    manifest = read_json(directory / MANIFEST)
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{MANIFEST}: format is {manifest.get('format')!r}; this version reads {_FORMAT}")
    config = _config(manifest.get("config"))
    return Checkpoint(
        name=str(manifest.get("name", directory.name)),
        config=config,
        params=restore_params((directory / _PARAMS).absolute(), config, dtype, quantize, shardings, progress),
        tokenizer=load_tokenizer(directory),
        chat_template=chat_template(directory),
        eos_ids=eos_ids(manifest.get("eos_ids"), MANIFEST),
        sampling=checked_sampling(manifest.get("sampling", {}), MANIFEST),
    )


def read_config(directory: Path) -> ModelConfig:
    """The configuration of the checkpoint in `directory`; no weight is read. Raises CheckpointError as `load_orbax`."""
    return _config(read_json(directory / MANIFEST).get("config"))


def read_structs(directory: Path, dtype: str, quantize: QuantizeName | None) -> Any:
    """The parameter tree that `load_orbax` makes, as shapes and dtypes; no weight is read. Raises as it does."""
    return read_param_structs((directory / _PARAMS).absolute(), read_config(directory), dtype, quantize)


def read_sampling(directory: Path) -> dict[str, float | int]:
    """The sampling that the checkpoint in `directory` recommends. Raises CheckpointError for one out of range."""
    return checked_sampling(read_json(directory / MANIFEST).get("sampling", {}), MANIFEST)


def _manifest(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "name": checkpoint.name,
        "config": dataclasses.asdict(checkpoint.config),
        "eos_ids": sorted(checkpoint.eos_ids),
        "sampling": dict(checkpoint.sampling),
    }


def _config(raw: Any) -> ModelConfig:
    """The configuration out of the manifest; a field that this version does not have is an error."""
    try:
        fields = _with_tuples(dict(raw))
        for name, part in _PARTS.items():
            if fields.get(name) is not None:
                fields[name] = part(**fields[name])
        return ModelConfig(**fields)
    except (TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{MANIFEST}: config cannot be read: {error}") from error


def _with_tuples(value: Any) -> Any:
    """JSON's lists as the tuples that configurations hold."""
    if isinstance(value, dict):
        return {name: _with_tuples(item) for name, item in value.items()}
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list) else value
