"""What a golden must show before it is written: every switch matters, no token's experts tie, names are the hub's."""

import re
from collections.abc import Iterable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from .recipe import Fields, Tiny

MOVES = 1e-2
"""How far a switch must move some logit; a hundred times what a test lets pass."""
MARGIN = 2e-3
"""How far the last expert chosen must be above the first one that is not."""


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of one sequence."""
    return model(ids[None]).logits[0]


def changed(config: PretrainedConfig, fields: Fields) -> PretrainedConfig:
    """The configuration with other `fields`."""
    return type(config)(**config.to_dict() | fields)


def rebuilt(model: PreTrainedModel, fields: Fields) -> PreTrainedModel:
    """A model of the same weights and another configuration."""
    other = AutoModelForCausalLM.from_config(changed(model.config, fields), dtype=torch.float32).eval()
    other.load_state_dict(model.state_dict())
    return other


def check_switches(tiny: Tiny, model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Each switch off, and each named tensor back to where a new model starts, gives other logits."""
    logits = logits_of(model, ids)
    fresh = AutoModelForCausalLM.from_config(tiny.config, dtype=torch.float32).state_dict()
    for label, fields in tiny.without.items():
        _check_moved(label, logits_of(rebuilt(model, fields), ids), logits)
    for pattern in tiny.neutral:
        state = model.state_dict()
        names = [name for name in state if re.search(pattern, name)]
        assert names, f"{pattern} matches no tensor"
        other = rebuilt(model, {})
        other.load_state_dict(state | {name: fresh[name] for name in names})
        _check_moved(pattern, logits_of(other, ids), logits)


def _check_moved(label: str, found: torch.Tensor, logits: torch.Tensor) -> None:
    moved = float((found - logits).abs().max())
    assert moved > MOVES, f"{label} moves the logits by {moved}; expected more than {MOVES}"


def check_margins(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """The least distance, over tokens and layers, between the experts chosen and the others; 1 without experts."""
    margins = [1.0]

    def keep(router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        margins.extend(_margins(router, output[0].float()))

    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(keep) for router in routers]
    logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    assert bool(routers) == (len(margins) > 1)
    assert min(margins) > MARGIN, f"two experts are {min(margins)} apart; expected {MARGIN}: take another seed"
    return min(margins)


def _margins(router: Any, logits: torch.Tensor) -> Iterable[float]:
    """Of the groups that may be chosen, and of the experts in those that were."""
    if not hasattr(router, "e_score_correction_bias"):
        yield from _gaps(logits, router.top_k)
        return
    scores = (logits.sigmoid() + router.e_score_correction_bias).unflatten(-1, (router.num_group, -1))
    best = scores.topk(2).values.sum(-1)
    yield from _gaps(best, router.topk_group)
    closed = best < best.topk(router.topk_group).values[:, -1:]
    yield from _gaps(scores.masked_fill(closed[..., None], -torch.inf).flatten(1), router.top_k)


def _gaps(scores: torch.Tensor, chosen: int) -> list[float]:
    best = scores.topk(chosen + 1).values if chosen < scores.shape[-1] else torch.full((1, 2), 0.0)
    return (best[:, -2] - best[:, -1]).tolist() if chosen < scores.shape[-1] else []


def check_names(tiny: Tiny, names: Iterable[str]) -> None:
    """Experts are stored one by one but in gpt-oss, whose files have them together."""
    together = [name for name in names if re.search(r"\.experts\.(gate_up|down)_proj", name)]
    assert bool(together) == (tiny.config.model_type == "gpt_oss"), together
