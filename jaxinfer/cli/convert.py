"""`jaxinfer convert`: any checkpoint to one that loads straight to its devices."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.flags import QuantizeFlag
from jaxinfer.config import DTypeName
from jaxinfer.errors import CheckpointError
from jaxinfer.progress import progress_bars

if TYPE_CHECKING:
    from jaxinfer.checkpoint.load import Checkpoint


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A directory, a .gguf file, hf:org/name, or demo.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The directory to make.")],
    *,
    dtype: Annotated[
        DTypeName, typer.Option(help="Of the stored weights; float32 loses nothing of any source.")
    ] = "float32",
    quantize: QuantizeFlag = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DST where it is a checkpoint of ours.")] = False,
) -> None:
    """Write a checkpoint as Orbax, verified.

    Orbax restores each leaf straight to the devices that will hold it; quantised ones stay quantised. DST appears when
    it is complete and was read back equal, not before.

    \b
    jaxinfer convert demo ./smollm2
    jaxinfer convert model.gguf ./model --dtype bfloat16
    jaxinfer convert model.gguf ./small --quantize stored
    jaxinfer convert hf:org/name ./name --force
    """
    from jaxinfer.checkpoint.load import load, resolve, save_orbax
    from jaxinfer.checkpoint.orbax import MANIFEST
    from jaxinfer.model.quantised import describe

    target = target.absolute()
    if target.exists() and not force:
        raise CheckpointError(f"{target} exists; choose another DST, or --force")
    if target.exists() and not (target / MANIFEST).is_file():
        raise CheckpointError(f"{target} is no checkpoint of ours, so --force does not replace it; remove it yourself")
    if target.exists() and target.samefile(resolve(source)):
        raise CheckpointError(f"{target} is both SRC and DST; choose another DST")
    draft = target.with_name(f".{target.name}.unverified")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        with progress_bars(sys.stderr.isatty()) as report:
            checkpoint = load(source, dtype=dtype, quantize=quantize, progress=report)
            save_orbax(checkpoint, draft)
            _check_equal(checkpoint, load(str(draft), dtype=dtype, progress=report))
        _replace(target, draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    kept = describe(checkpoint.params)
    print(f"{target}: {checkpoint.name}, {dtype}{f', {kept}' if kept else ''}, read back equal")


def _replace(target: Path, draft: Path) -> None:
    """Put `draft` where `target` is, which comes back where that fails."""
    old = target.with_name(f".{target.name}.replaced")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)  # what a killed run may have left
        target.rename(old)
    try:
        draft.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    if old.exists():  # also where a run was killed between the two renamings
        shutil.rmtree(old)


def _check_equal(ours: "Checkpoint", stored: "Checkpoint") -> None:
    """Raise CheckpointError where what was read back is not, byte for byte, what was written."""
    import numpy as np

    from jaxinfer.checkpoint.fill import flatten
    from jaxinfer.model.quantised import parts_of

    def numbers(leaf: Any) -> list[bytes]:
        return [np.asarray(part).tobytes() for part in parts_of(leaf)]

    wanted, found = flatten(ours.params), flatten(stored.params)
    plain = ("config", "eos_ids", "chat_template", "sampling")
    differing = [name for name in plain if getattr(ours, name) != getattr(stored, name)]
    differing += ["tokenizer"] if ours.tokenizer.files() != stored.tokenizer.files() else []
    differing += ["/".join(p) for p, leaf in wanted.items() if numbers(leaf) != numbers(found[p])]
    if differing:
        raise CheckpointError(f"{differing[0]} was read back different from what was written; try another disk")
