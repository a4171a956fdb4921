"""Our own directories: what was saved comes back, bit for bit, where it is wanted; damage is named."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.fill import flatten, unflatten
from jaxinfer.checkpoint.load import load, load_structs, save_orbax
from jaxinfer.checkpoint.orbax import save_trained
from jaxinfer.checkpoint.quantise import quantise
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.model.quantised import describe, parts_of, quantisable

from .makers import gguf_fields, gguf_tensors, hf_config, hf_weights, write_gguf, write_hf

TEXT = "ab  é안녕 🙂\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    fields = gguf_fields("gemma3", tokenizer__chat_template="{{ messages }}", tokenizer__ggml__eot_token_id=9)
    tensors = gguf_tensors("gemma3", hf_weights("gemma3"))
    return load(
        str(write_gguf(tmp_path_factory.mktemp("source") / "m.gguf", "gemma3", tensors, fields)), dtype="float32"
    )


@pytest.fixture
def saved(source: Checkpoint, tmp_path: Path) -> Path:
    save_orbax(source, tmp_path / "saved")
    return tmp_path / "saved"


# Orbax leaves its event loop when one read fails while others are still going; when those end they find it closed, and
# Python reports that as an exception that nobody could catch, in whatever test runs then.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in directory.rglob("*"))
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.mark.parametrize("victim", ["jaxinfer.json", "tokenizer.json", "params/_METADATA", "params/manifest.ocdbt"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_damaged_file(saved: Path, victim: str, damage: str):
    path = saved / victim
    raw = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError):
        load(str(saved), dtype="float32")


def test_weights_that_are_gone(saved: Path):
    for path in (saved / "params").rglob("d/*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="cannot be restored"):
        load(str(saved), dtype="float32")


def test_what_was_saved_comes_back(source: Checkpoint, saved: Path):
    found = load(str(saved), dtype="float32")
    assert (found.name, found.config) == (source.name, source.config)
    assert (found.eos_ids, found.chat_template) == (source.eos_ids, source.chat_template)
    assert found.tokenizer.encode(TEXT) == source.tokenizer.encode(TEXT)
    assert jax.tree.structure(found.params) == jax.tree.structure(source.params)
    jax.tree.map(np.testing.assert_array_equal, found.params, source.params)


def test_a_hugging_face_directory_is_kept_whole(tmp_path: Path):
    one = load(
        str(write_hf(tmp_path / "hf", hf_config("llama"), {"model.safetensors": hf_weights("llama")})), dtype="float32"
    )
    save_orbax(one, tmp_path / "saved")
    other = load(str(tmp_path / "saved"), dtype="float32")
    assert other.config == one.config
    assert other.tokenizer.encode(TEXT) == one.tokenizer.encode(TEXT)
    jax.tree.map(np.testing.assert_array_equal, other.params, one.params)


def test_reading_writes_nothing(saved: Path):
    before = listing(saved)
    load(str(saved), dtype="float32")
    assert listing(saved) == before


def test_nothing_in_it_is_a_pickle(saved: Path):
    """A pickle of protocol 2 and later begins with 0x80 and its protocol's number."""
    heads = [path.read_bytes()[:2] for path in saved.rglob("*") if path.is_file()]
    assert len(heads) > 5
    assert not set(heads) & {bytes([0x80, protocol]) for protocol in range(2, 8)}


def test_it_is_hardly_larger_than_the_weights(source: Checkpoint, saved: Path):
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(source.params))
    assert sum(path.stat().st_size for path in saved.rglob("*") if path.is_file()) < weights + 40_000


def test_leaves_are_restored_to_their_dtype_and_sharding(source: Checkpoint, saved: Path):
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    split, whole = NamedSharding(mesh, PartitionSpec("tensor")), NamedSharding(mesh, PartitionSpec())

    def shardings(config: Any) -> Any:
        return jax.tree.map(lambda leaf: split if leaf.shape[0] == config.kv_heads else whole, source.params)

    found = load(str(saved), dtype="bfloat16", shardings=shardings).params
    qkv = found["block_0"]["attention"]["qkv"]
    assert qkv.dtype == jnp.bfloat16
    assert qkv.sharding == split
    assert found["final_norm"].dtype == jnp.float32
    expected = source.params["block_0"]["attention"]["qkv"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(qkv), np.asarray(expected))


def test_a_directory_that_is_there_is_not_overwritten(source: Checkpoint, saved: Path):
    before = listing(saved)
    with pytest.raises(CheckpointError, match="saved already exists"):
        save_orbax(source, saved)
    assert listing(saved) == before


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing_behind(source: Checkpoint, tmp_path: Path, failure: BaseException):
    class Broken:
        def files(self) -> dict[str, bytes]:
            raise failure

    with pytest.raises(type(failure)):
        save_orbax(dataclasses.replace(source, tokenizer=Broken()), tmp_path / "saved")  # pyright: ignore
    assert not list(tmp_path.iterdir())


def test_a_trained_model_is_saved_with_its_tokenizer_file(source: Checkpoint, tmp_path: Path):
    for name, data in source.tokenizer.files().items():
        (tmp_path / name).write_bytes(data)
    save_trained("trained", source.config, source.params, tmp_path / "tokenizer.json", tmp_path / "out")
    found = load(str(tmp_path / "out"), dtype="float32")
    assert (found.name, found.config, found.eos_ids) == ("trained", source.config, source.tokenizer.eos_ids)
    jax.tree.map(np.testing.assert_array_equal, found.params, source.params)


LOADING = """
import sys
from jaxinfer.checkpoint.load import load
from jaxinfer.errors import CheckpointError
try:
    load(sys.argv[1], dtype="float32")
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [("ocdbt.process_0/d/*", None), ("ocdbt.process_0/d/*", b""), ("array_metadatas/*", b"[" * 100_000)],
    ids=["missing", "empty", "nested"],
)
def test_a_damaged_file_of_weights(saved: Path, pattern: str, damage: bytes | None):
    path = max((saved / "params").glob(pattern), key=lambda path: path.stat().st_size)
    path.unlink() if damage is None else path.write_bytes(damage)
    # A process of its own: Orbax leaves coroutines behind, whose warnings would fall on another test.
    ended = subprocess.run([sys.executable, "-c", LOADING, str(saved)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("params cannot be restored by Orbax: ")
    assert len(ended.stdout) < 400


def edit(path: Path, change: dict[str, Any]) -> None:
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, **change}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format is 2"),
        ({"config": None}, "config cannot be read"),
        ({"config": {"family": "gemma3"}}, "config cannot be read"),
        ({"eos_ids": [10_000]}, "end-of-text id 10000"),
        ({"eos_ids": "2"}, "end-of-text id"),
    ],
)
def test_a_damaged_manifest(saved: Path, change: dict[str, Any], message: str):
    edit(saved / "jaxinfer.json", change)
    with pytest.raises(CheckpointError, match=message):
        load(str(saved), dtype="float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 3, "windows": [8, 8, 8]}, r"block_2/attention.* is missing"),
        ({"layers": 1, "windows": [8]}, r"block_1/.* is surplus"),
        ({"mlp_width": 64}, r"block_0/mlp/down has shape \(32, 32\); expected \(32, 64\)"),
        ({"tied_head": False}, "head is missing"),
        ({"layers": 10**9, "windows": []}, "1000000000 layers"),
        ({"new_switch": True}, "new_switch"),
        ({"family": 7}, "family"),
        ({"vocab_size": 2**70}, "vocab_size"),
        ({"width": 2**31 - 1, "mlp_width": 2**31 - 1}, "has shape"),
        ({"head_dim": 2**31 - 2}, "head_dim is 2147483646"),
        ({"windows": [0, 0]}, "windows"),
        ({"windows": ["8", 8]}, "windows"),
        ({"activation": "relu"}, "activation"),
        ({"norm_eps": "1e-5"}, "norm_eps"),
        ({"query_scale": None}, "query_scale"),
        ({"embedding_scale": float("inf")}, "embedding_scale"),
        ({"logit_softcap": 0}, "logit_softcap"),
        ({"qk_norm": 1}, "qk_norm"),
        ({"norm_eps": 2**200}, "norm_eps"),
        ({"rope": None}, "rope"),
        ({"rope": {"theta": float("nan")}}, "theta"),
        ({"rope": {"kind": "linear", "factor": "2"}}, "factor"),
        ({"rope": {"kind": "llama3", "factor": 2.0, "original_context": 0}}, "original_context"),
    ],
)
def test_a_configuration_that_does_not_fit_the_weights(saved: Path, change: dict[str, Any], message: str):
    config = json.loads((saved / "jaxinfer.json").read_text())["config"]
    edit(saved / "jaxinfer.json", {"config": {**config, **change}})
    with pytest.raises(CheckpointError, match=message):
        load(str(saved), dtype="float32")


def numbers(leaf: Any) -> list[bytes]:
    return [np.asarray(part).tobytes() for part in parts_of(leaf)]


@pytest.fixture(scope="module")
def quantised(narrow_matrices_in_int4: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Path]:
    """A model in int4 (its embedding in int8), and the directory it was saved to."""
    place = tmp_path_factory.mktemp("quantised")
    tensors = gguf_tensors("gemma3", hf_weights("gemma3"))
    path = write_gguf(place / "m.gguf", "gemma3", tensors, gguf_fields("gemma3"))
    made = load(str(path), dtype="float32", quantize="int4")
    save_orbax(made, place / "saved")
    return made, place / "saved"


@pytest.mark.parametrize("quantize", [None, "stored"])
def test_quantised_leaves_come_back_as_they_are(quantised: tuple[Checkpoint, Path], quantize: Any):
    made, directory = quantised
    again = load(str(directory), dtype="float32", quantize=quantize)
    assert jax.tree.structure(again.params) == jax.tree.structure(made.params)
    assert "int4 in groups of 32 with offsets" in describe(again.params)
    for path, leaf in flatten(made.params).items():
        assert numbers(flatten(again.params)[path]) == numbers(leaf), path
    planned = flatten(load_structs(str(directory), "float32", quantize))
    assert {p: x.shape for p, x in planned.items()} == {p: x.shape for p, x in flatten(made.params).items()}


def test_plain_leaves_can_be_quantised_as_they_are_read(saved: Path, source: Checkpoint):
    again = flatten(load(str(saved), dtype="float32", quantize="int8").params)
    for path, leaf in flatten(source.params).items():
        expected = quantise(path, np.asarray(leaf), "int8") if quantisable(path) else leaf
        assert numbers(again[path]) == numbers(expected), path


def test_what_the_directory_does_not_hold_is_refused(saved: Path, quantised: tuple[Checkpoint, Path]):
    with pytest.raises(ConfigError, match="quantize is 'stored', but the directory holds plain weights alone"):
        load(str(saved), dtype="float32", quantize="stored")
    with pytest.raises(ConfigError, match=r"quantize is 'int8', but .* was quantised when the directory was made"):
        load(str(quantised[1]), dtype="float32", quantize="int8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda leaf: dataclasses.replace(leaf, scale=jnp.ones((leaf.shape[0], 3))), "scale has shape .* no groups"),
        (lambda leaf: dataclasses.replace(leaf, scale=leaf.scale[:-1]), "scale has shape .* no groups"),
        (lambda leaf: dataclasses.replace(leaf, scale=leaf.scale.astype(jnp.int8)), "scale is int8; expected float32"),
        (lambda leaf: dataclasses.replace(leaf, values=leaf.values.astype(jnp.int32)), "values of int32"),
        (lambda leaf: dataclasses.replace(leaf, values=leaf.values[:-1]), "values has shape"),
        (lambda leaf: {"values": leaf.values}, "scale is missing"),
        (lambda leaf: {"values": leaf.values, "scale": leaf.scale, "spare": leaf.scale}, "spare .* is surplus"),
    ],
)
def test_parts_that_do_not_fit_are_named(quantised: tuple[Checkpoint, Path], tmp_path: Path, change: Any, message: str):
    made, _ = quantised
    leaves = flatten(made.params)
    leaves["block_0", "mlp", "down"] = change(leaves["block_0", "mlp", "down"])
    save_orbax(dataclasses.replace(made, params=unflatten(leaves)), tmp_path / "changed")
    with pytest.raises(CheckpointError, match=f"block_0/mlp/down.*{message}|{message}"):
        load(str(tmp_path / "changed"), dtype="float32")
