"""Serves decoder-only language models with JAX: Python, gRPC streaming and batch files, on TPU, GPU and CPU.

The names below are loaded on first use, so that `import jaxinfer` and `jaxinfer --help` do not wait for JAX.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.config import CacheConfig, EngineConfig, MeshConfig
    from jaxinfer.errors import JaxInferError
    from jaxinfer.llm import LLM, TokenStream
    from jaxinfer.output import Choice, Output
    from jaxinfer.request import Delta, FinishReason, SamplingParams, Timing, TokenLogprob, Usage

__all__ = [
    "LLM",
    "CacheConfig",
    "Choice",
    "Delta",
    "EngineConfig",
    "FinishReason",
    "JaxInferError",
    "MeshConfig",
    "Output",
    "SamplingParams",
    "Timing",
    "TokenLogprob",
    "TokenStream",
    "Usage",
]

_HOME = {
    "jaxinfer.config": ("CacheConfig", "EngineConfig", "MeshConfig"),
    "jaxinfer.errors": ("JaxInferError",),
    "jaxinfer.llm": ("LLM", "TokenStream"),
    "jaxinfer.output": ("Choice", "Output"),
    "jaxinfer.request": ("Delta", "FinishReason", "SamplingParams", "Timing", "TokenLogprob", "Usage"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

try:
    __version__ = version("jaxinfer")
except PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
