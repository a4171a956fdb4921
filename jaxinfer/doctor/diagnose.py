"""The whole examination of one model, in order, and what came of it.

Knows: which step follows which, and what counts as a fault. Prints nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench import measure_machine
from jaxinfer.checkpoint.explain import explain_config, stored_tensors
from jaxinfer.checkpoint.fill import flatten
from jaxinfer.checkpoint.load import Checkpoint, load, resolve
from jaxinfer.checkpoint.tensors import Tensors
from jaxinfer.config import ModelConfig, QuantizeName
from jaxinfer.doctor.compare import (
    TOLERANCE,
    Difference,
    Reference,
    differences,
    diverging_tensors,
    first_divergence,
    plain,
)
from jaxinfer.doctor.forward import LOGITS, Activations, Probe
from jaxinfer.doctor.reference import require_reference, run_reference
from jaxinfer.doctor.tensors import TensorStats, inspect, suspicions
from jaxinfer.engine.cache import page_bytes
from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.model.quantised import bytes_of, bytes_per_weight, describe, is_quantised, parts_of
from jaxinfer.progress import Report
from jaxinfer.roofline import bound, decode_cost

STEPS = 24
LONGEST = 512
"""Tokens of a prompt: what every part makes of each is kept."""
PROMPT = "The capital of France is"


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt through our decoder.

    text: what follows greedily. not_finite: the first part whose output is not. kernels: which run, and why. weights:
    what they are kept in. weight_bytes and cache_bytes (per token): what the model takes in memory. step_ms: the least
    time of a decode step behind this prompt on this machine; bound_by: which of the machine's limits sets it.
    """

    prompt: str
    text: str
    not_finite: str | None
    kernels: str
    weights: str
    weight_bytes: int
    cache_bytes: int
    step_ms: float
    bound_by: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours beside the reference: every part, the first that diverges, and the tensors of it that we hold otherwise."""

    parts: tuple[Difference, ...]
    diverged: str | None
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What was found. `suspicious` is a (tensor, why) for each tensor that looks wrong."""

    name: str
    config: ModelConfig
    ignored: tuple[str, ...]
    tensors: tuple[TensorStats, ...]
    suspicious: tuple[tuple[str, str], ...]
    run: Run
    comparison: Comparison | None = None

    @property
    def faults(self) -> list[str]:
        """What should not be so, one a line; empty where the model is healthy."""
        return [f"tensor {name}: {why}" for name, why in self.suspicious] + _run_faults(self.run, self.comparison)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "faults": self.faults}


def _run_faults(run: Run, comparison: Comparison | None) -> list[str]:
    faults = [] if run.not_finite is None else [f"run: {run.not_finite} is not finite"]
    if comparison is not None and comparison.diverged is not None:
        names = comparison.tensors
        blamed = (
            f"the first tensor that differs is {names[0]}"
            if names
            else "its tensors are the same, so the arithmetic or the configuration is not"
        )
        faults.append(f"reference: {comparison.diverged} is the first part that diverges; {blamed}")
    return faults


def diagnose(
    ref: str,
    *,
    prompt: str = PROMPT,
    dtype: str = "float32",
    quantize: QuantizeName | None = None,
    reference: Path | None = None,
    tolerance: float = TOLERANCE,
    report: Report | None = None,
) -> Diagnosis:
    """Examine the model `ref`, with its weights in `dtype`; beside the Hugging Face directory `reference` if given.

    quantize: what `load` is to make of the large matrices, which then differ from a reference by their rounding.
    tolerance: the share of a part's largest magnitude that it may differ by. Raises CheckpointError or ConfigError
    where the model, or the reference, cannot be loaded at all; RequestError for a prompt that does not fit.
    """
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance is {tolerance}; expected a share above 0 and below 1")
    if reference is not None:
        require_reference(reference)
    ignored = explain_config(ref).ignored
    stored = stored_tensors(resolve(ref))
    tensors = [] if stored is None else _inspect(stored, report)
    checkpoint = load(ref, dtype=dtype, quantize=quantize, progress=report)
    if stored is None:
        tensors = _inspect(_Leaves(checkpoint.params), report)
    ids = _ids(checkpoint, prompt)
    probe = Probe(checkpoint.config, checkpoint.params, dtype, len(ids) + STEPS, checkpoint.tokenizer.vocab_size)
    parts = probe.activations(ids)
    return Diagnosis(
        name=checkpoint.name,
        config=checkpoint.config,
        ignored=ignored,
        tensors=tuple(tensors),
        suspicious=tuple(suspicions(tensors, checkpoint.tokenizer.vocab_size)),
        run=_run(checkpoint, probe, prompt, ids, parts, dtype),
        comparison=None if reference is None else _beside(checkpoint, reference, ids, parts, dtype, tolerance),
    )


class _Leaves:
    """The leaves of our own tree as tensors, for a checkpoint that stores nothing else."""

    def __init__(self, params: Any) -> None:
        self._leaves = {"/".join(path): leaf for path, leaf in flatten(params).items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: leaf.shape for name, leaf in self._leaves.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        return plain(self._leaves[name])[start:stop]


def _inspect(tensors: Tensors, report: Report | None) -> list[TensorStats]:
    found = []
    for name in tensors.shapes:
        if report:
            report("inspect tensors", len(found), len(tensors.shapes))
        found.append(inspect(tensors, name))
    if report:
        report("inspect tensors", len(found), len(found))
    return found


def _ids(checkpoint: Checkpoint, prompt: str) -> list[int]:
    ids, room = checkpoint.tokenizer.encode(prompt, special=True), min(LONGEST, checkpoint.config.context - STEPS)
    if not 1 <= len(ids) <= room:
        raise RequestError(f"the prompt has {len(ids)} tokens; expected 1 to {room}")
    return ids


def _run(checkpoint: Checkpoint, probe: Probe, prompt: str, ids: Sequence[int], parts: Activations, dtype: str) -> Run:
    broken = next((name for name, value in parts.items() if not np.isfinite(value).all()), None)
    made: list[int] = []
    if broken is None:
        made, finite = probe.greedy(ids, parts[LOGITS][-1], STEPS, checkpoint.eos_ids)
        broken = None if finite else f"{LOGITS} of the token {len(made)} behind the prompt"
    params, length, itemsize = checkpoint.params, [len(ids) + STEPS], jnp.dtype(dtype).itemsize
    cost = decode_cost(checkpoint.config, length, itemsize, weight_bytes=bytes_per_weight(params))
    step, kept = bound(cost, measure_machine(dtype)), describe(params)
    arrays = [part for leaf in jax.tree.leaves(params, is_leaf=is_quantised) for part in parts_of(leaf)]
    return Run(
        prompt=prompt,
        text=checkpoint.tokenizer.decode(made),
        not_finite=broken,
        kernels=probe.why,
        weights=f"{dtype}, weights in {kept}" if kept else dtype,
        weight_bytes=int(sum(map(bytes_of, arrays))),
        cache_bytes=page_bytes(checkpoint.config, 1, dtype),
        step_ms=1e3 * step.seconds,
        bound_by=step.limit,
    )


def _beside(
    checkpoint: Checkpoint, reference: Path, ids: Sequence[int], parts: Activations, dtype: str, tolerance: float
) -> Comparison:
    """Ours beside transformers, with the frequencies that it takes for a sequence of this length."""
    config = checkpoint.config
    alike = replace(config, context=shortest_context(config, len(ids)))
    if alike != config:
        probe = Probe(alike, checkpoint.params, dtype, len(ids), checkpoint.tokenizer.vocab_size)
        parts = probe.activations(ids)
    return compared(checkpoint, run_reference(reference, ids), parts, tolerance)


def shortest_context(config: ModelConfig, tokens: int) -> int:
    """The context for which we turn `tokens` tokens as transformers does.

    It chooses between longrope's two sets of factors call by call; we once, by what a sequence may grow to.
    """
    return config.rope.original_context if _is_short(config, tokens) else config.context


def _is_short(config: ModelConfig, tokens: int) -> bool:
    return config.rope.kind == "longrope" and tokens <= config.rope.original_context < config.context


def compared(checkpoint: Checkpoint, reference: Reference, parts: Activations, tolerance: float) -> Comparison:
    """Ours beside a reference that was run on the same ids. Raises CheckpointError where it is another model."""
    rows = differences(parts, reference.activations)
    first = first_divergence(rows, tolerance)
    blamed = () if first is None else diverging_tensors(checkpoint.config, checkpoint.params, first.part, reference)
    return Comparison(tuple(rows), first.part if first else None, tuple(blamed))
