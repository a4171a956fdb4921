"""Frozen configuration, checked when it is made: the model's arithmetic, the cache, the mesh, the engine.

Knows: which fields there are and which pairs of them cannot work. Reads no file, no environment, imports no JAX.
"""

from jaxinfer.config.engine import CacheConfig, DTypeName, EngineConfig, KVDTypeName, MeshConfig, QuantizeName
from jaxinfer.config.model import Activation, ExpertsConfig, LatentConfig, ModelConfig, QKNorm, Scoring
from jaxinfer.config.rope import RopeConfig, RopeKind

__all__ = [
    "Activation",
    "CacheConfig",
    "DTypeName",
    "EngineConfig",
    "ExpertsConfig",
    "KVDTypeName",
    "LatentConfig",
    "MeshConfig",
    "ModelConfig",
    "QKNorm",
    "QuantizeName",
    "RopeConfig",
    "RopeKind",
    "Scoring",
]
