"""A tiny llama on disk, whole and damaged, and transformers' recording of it (scripts/make_goldens.py activations)."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.doctor.compare import Reference
from jaxinfer.roofline import Chip

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = GOLDEN / "tiny_llama"

Damage = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="session")
def recording() -> dict[str, np.ndarray]:
    """The parts' outputs, and `ids`."""
    return dict(np.load(GOLDEN / "activations.npz"))


@pytest.fixture(scope="session")
def reference(recording: dict[str, np.ndarray]) -> Reference:
    parts = {name: value for name, value in recording.items() if name != "ids"}
    return Reference(parts, load_file(TINY / "model.safetensors"))


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny llama with some tensors changed and some fields more in its config.json."""

    def write(tensors: Mapping[str, Damage] | None = None, **fields: Any) -> Path:
        directory = tmp_path / "damaged"
        shutil.copytree(TINY, directory)
        weights = load_file(TINY / "model.safetensors")
        weights |= {name: change(weights[name].copy()) for name, change in (tensors or {}).items()}
        save_file(weights, directory / "model.safetensors")
        config = json.loads((TINY / "config.json").read_text()) | fields
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return write


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that need not be measured: 1 GB/s and plenty of FLOPs."""
    monkeypatch.setattr("jaxinfer.doctor.diagnose.measure_machine", lambda dtype: Chip("this machine", 1e15, 1e9, 1e9))


def scaled(factor: float) -> Damage:
    return lambda x: x * np.float32(factor)


def without_row(row: int) -> Damage:
    def change(x: np.ndarray) -> np.ndarray:
        x[row] = 0
        return x

    return change


def with_nan(x: np.ndarray) -> np.ndarray:
    x.flat[7] = np.nan
    return x
