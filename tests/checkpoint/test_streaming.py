"""Peak host memory of a load, as the kernel measures it: the model in its target dtype and a fifth of it.

The promise allows one shard more, which nothing needs: no file is mapped. On the CPU device memory is host memory,
so the model itself counts. Every leaf with several sources has them in different shards.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from . import makers
from .makers import gguf_fields, hf_config, hf_weights, write_hf

MEGABYTE = 2**20
SHARDS = 4
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
SIZES = {"WIDTH": 1024, "HEADS": 16, "KV_HEADS": 4, "HEAD_DIM": 64}
DEEP = {**SIZES, "LAYERS": 7, "MLP": 2816}
"""78 million weights, most of them in blocks."""
SHALLOW = {**SIZES, "LAYERS": 2, "MLP": 2816, "VOCAB": 49_152}
"""73 million weights, two thirds of them in the embedding."""

MEASURE = """
import re, sys
from pathlib import Path
import jax
from jaxinfer.checkpoint.load import load

def memory(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

small, large, dtype = sys.argv[1:]
load(small, dtype=dtype)
before = memory("VmRSS")  # with every library and every page of code that a load takes
Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
params = load(large, dtype=dtype).params
print(memory("VmHWM") - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


def measure(small: Path, large: Path, dtype: str) -> tuple[int, int]:
    """Bytes at the peak of loading `large`, mapped files included, and bytes of its parameters."""
    ended = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(large), dtype], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    peak, model = map(int, ended.stdout.split())
    return peak, model


def resize(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]) -> dict[str, Any]:
    """Makes `makers` write models of `sizes`; returns what their configurations change."""
    for name, value in sizes.items():
        monkeypatch.setattr(makers, name, value)
    return {
        "hidden_size": makers.WIDTH,
        "num_hidden_layers": makers.LAYERS,
        "num_attention_heads": makers.HEADS,
        "num_key_value_heads": makers.KV_HEADS,
        "head_dim": makers.HEAD_DIM,
        "intermediate_size": makers.MLP,
        "vocab_size": makers.VOCAB,
    }


def write_shards(directory: Path, dtype: Any, changes: dict[str, Any]) -> Path:
    """A directory whose tensors go to the shards in turn; float8 ones have scales, in another shard each."""
    weights = {name: value.astype(dtype) for name, value in hf_weights("llama").items()}
    if dtype == ml_dtypes.float8_e4m3fn:
        changes = {**changes, "quantization_config": FP8}
        for name in list(weights):
            if "_proj" in name:
                grid = tuple(-(-size // 128) for size in weights[name].shape)
                weights[f"{name}_scale_inv"] = np.ones(grid, np.float32)
            else:
                weights[name] = weights[name].astype(ml_dtypes.bfloat16)
    items = list(weights.items())
    shards = {f"model-{i}.safetensors": dict(items[i::SHARDS]) for i in range(SHARDS)}
    return write_hf(directory, hf_config("llama", **changes), shards)


def assert_bounded(peak: int, model: int) -> None:
    assert model > 140 * MEGABYTE
    assert peak >= model, "the measurement misses the model itself"
    assert peak <= 1.2 * model


@pytest.mark.parametrize(
    ("sizes", "stored", "wanted"),
    [
        (DEEP, np.float32, "bfloat16"),
        (SHALLOW, np.float32, "bfloat16"),
        (DEEP, ml_dtypes.bfloat16, "float32"),
        (DEEP, ml_dtypes.float8_e4m3fn, "bfloat16"),
    ],
    ids=["f32-bf16", "embedding-f32-bf16", "bf16-f32", "fp8-bf16"],
)
def test_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], stored: Any, wanted: str):
    small = write_shards(tmp_path / "small", stored, {})
    large = write_shards(tmp_path / "large", stored, resize(monkeypatch, sizes))
    assert_bounded(*measure(small, large, wanted))


def write_quantised(path: Path, kind: GGMLQuantizationType, fields: dict[str, Any]) -> Path:
    """A llama file whose matrices are all of `kind`: one decoded row, over and over."""
    block, _ = GGML_QUANT_SIZES[kind]
    row = gguf.quantize(np.linspace(-1, 1, block, dtype=np.float32)[None], kind)
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        makers.add_field(writer, name, value)
    for name, value in makers.gguf_tensors("llama", hf_weights("llama")).items():
        if value.ndim == 2:
            raw = np.tile(row, (value.shape[0], value.shape[1] // block))
            writer.add_tensor(name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [(GGMLQuantizationType.Q4_0, "bfloat16"), (GGMLQuantizationType.Q8_0, "float32")],
    ids=["q4_0-bf16", "q8_0-f32"],
)
def test_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: GGMLQuantizationType, wanted: str):
    small = write_quantised(tmp_path / "small.gguf", kind, gguf_fields("llama"))
    resize(monkeypatch, DEEP)
    large = write_quantised(tmp_path / "large.gguf", kind, gguf_fields("llama"))
    assert_bounded(*measure(small, large, wanted))
