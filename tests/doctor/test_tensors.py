"""Every kind of damage is named, and sound models are not accused."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.checkpoint import tensors as pieces_of
from jaxinfer.checkpoint.explain import stored_tensors
from jaxinfer.doctor.tensors import TensorStats, inspect, suspicions

GOLDEN = Path(__file__).parents[1] / "golden"
NONE = 10**9


class Stored:
    """Tensors in memory."""

    def __init__(self, **arrays: np.ndarray) -> None:
        self._arrays = arrays
        self.shapes = {name: array.shape for name, array in arrays.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._arrays[name][start:stop]


def look(array: np.ndarray, name: str = "layers.0.weight") -> TensorStats:
    return inspect(Stored(**{name: array}), name)


def sound(layers: int = 4) -> dict[str, np.ndarray]:
    """A small decoder's tensors."""
    rng = np.random.default_rng(0)
    return {
        "embed.weight": rng.standard_normal((20, 16), np.float32) * 0.1,
        **{f"{i}.q.weight": rng.standard_normal((16, 16), np.float32) / 4 for i in range(layers)},
        **{f"{i}.down.weight": rng.standard_normal((16, 64), np.float32) / 8 for i in range(layers)},
        **{f"{i}.norm.weight": 1 + rng.standard_normal(16, np.float32) / 9 for i in range(layers)},
        **{f"{i}.q.bias": np.zeros(16, np.float32) for i in range(layers)},
    }


def accused(tensors: dict[str, np.ndarray], vocabulary: int = NONE) -> dict[str, str]:
    stored = Stored(**tensors)
    return dict(suspicions([inspect(stored, name) for name in stored.shapes], vocabulary))


def test_figures_are_those_of_the_whole_tensor():
    array = np.array([[3.0, 0.0, -4.0, 0.0] * 2, [1.0] * 8, [0.0] * 8], np.float32)
    found = look(array)
    assert (found.size, found.broken, found.absmax) == (24, 0, 4.0)
    assert found.rms == pytest.approx(math.sqrt((2 * 25 + 8) / 24))
    assert found.zeros == pytest.approx(12 / 24)
    assert found.constant_rows == (1, 2)


def test_what_is_not_finite_is_counted_and_left_out_of_the_other_figures():
    found = look(np.array([[1.0, np.nan, 1.0, -np.inf, np.inf, 1.0, 1.0, 1.0]], np.float32))
    assert (found.broken, found.absmax, found.rms, found.zeros) == (3, 1.0, 1.0, 0.0)


@given(rows=st.integers(1, 9), piece=st.integers(1, 40), seed=st.integers(0, 99))
def test_pieces_give_the_figures_of_the_whole(rows: int, piece: int, seed: int):
    rng = np.random.default_rng(seed)
    array = rng.integers(-2, 3, (rows, 8)).astype(np.float32)
    array[rng.integers(0, rows)] = 7
    array[rng.integers(0, rows), 3] = np.nan
    with pytest.MonkeyPatch.context() as patch:
        whole = look(array)
        patch.setattr(pieces_of, "_PIECE", piece)
        parts = look(array)
    assert parts == whole


def test_a_sound_model_is_not_accused():
    assert accused(sound()) == {}


@pytest.mark.parametrize("name", ["2.q.weight", "1.norm.weight", "embed.weight", "3.q.bias"])
def test_a_nan_anywhere_is_named(name: str):
    tensors = sound()
    tensors[name].flat[5] = np.nan
    assert accused(tensors) == {name: f"1 of {tensors[name].size} numbers are NaN or infinite"}


def test_an_infinity_of_half_precision_is_named():
    tensors = sound() | {"0.q.weight": np.full((16, 16), 0.25, np.float16) * np.float16(np.inf)}
    assert list(accused(tensors)) == ["0.q.weight"]


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_row_of_one_number_is_named(value: float):
    tensors = sound()
    tensors["2.down.weight"][[3, 7]] = value
    assert accused(tensors) == {"2.down.weight": "row 3, 7 holds one number over and over"}


def test_many_dead_rows_are_counted():
    tensors = sound()
    tensors["2.down.weight"][:6] = 1.0
    assert accused(tensors) == {"2.down.weight": "row 0, 1, 2, 3 and 2 more holds one number over and over"}


def test_rows_that_pad_a_vocabulary_may_be_anything():
    tensors = sound()
    tensors["embed.weight"][17:] = 0.0
    assert accused(tensors, vocabulary=17) == {}
    assert "row 17" in accused(tensors, vocabulary=18)["embed.weight"]


@pytest.mark.parametrize("factor", [100.0, 0.01])
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("name", ["0.q.weight", "0.down.weight", "embed.weight"])
def test_a_matrix_of_another_scale_is_the_only_one_named(name: str, layers: int, factor: float):
    tensors = sound(layers)
    tensors[name] *= factor
    found = accused(tensors)
    assert list(found) == [name]
    assert found[name].startswith("its scale is ")


def test_a_norm_of_another_scale_is_named_and_a_bias_may_have_any():
    tensors = sound()
    tensors["1.norm.weight"] *= 100
    tensors["1.q.bias"] += 1e4
    assert list(accused(tensors)) == ["1.norm.weight"]


def test_a_matrix_of_zeros_is_named_once():
    tensors = sound()
    tensors["1.q.weight"][:] = 0
    assert accused(tensors) == {"1.q.weight": "100% of its numbers are 0"}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("tiny_*")), ids=lambda path: path.name)
def test_no_family_s_tiny_model_is_accused(path: Path):
    stored = stored_tensors(path)
    assert stored is not None
    assert suspicions([inspect(stored, name) for name in stored.shapes], NONE) == []


@pytest.mark.parametrize("path", ["demo_path", "gemma_path"])
def test_real_models_are_not_accused(path: str, request: pytest.FixtureRequest):
    stored = stored_tensors(request.getfixturevalue(path))
    assert stored is not None
    found = [inspect(stored, name) for name in stored.shapes]
    assert len(found) > 200
    assert suspicions(found, NONE) == []
