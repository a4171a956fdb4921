"""How a checkpoint recommends to sample from it, and where its texts end: `generation_config.json`, and GGUF's fields.

Knows: which of their fields mean what `SamplingParams` means. A recommendation is kept and shown; it is applied only
where a caller asks for that (`--sampling checkpoint`), since a default may not change a model's distribution.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.files import eos_ids, read_json
from jaxinfer.errors import BadSamplingParam, CheckpointError
from jaxinfer.request import SamplingParams

GENERATION_CONFIG = "generation_config.json"
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What can be recommended, by its name in `generation_config.json`, which is that in SamplingParams too."""
_GGUF = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1.0,),
    "penalty_alpha": (0.0,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "length_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "renormalize_logits": (False,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "stop_strings": (),
}
"""Fields of transformers that change which tokens come out and that are not followed, with the values that do nothing.

Every other field is about lengths, caches, or ids that are read elsewhere.
"""


@dataclass(frozen=True, slots=True)
class Generation:
    """sampling: recommended values of `SamplingParams` fields. ignored: names of fields that ask for more than that, or
    for a value that `SamplingParams` does not take: advice that nobody asked for must not stop a model from loading.
    """

    eos_ids: frozenset[int] = frozenset()
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def read_generation(directory: Path) -> Generation:
    """What `generation_config.json` says, if it is there. Raises CheckpointError where it is damaged."""
    path = directory / GENERATION_CONFIG
    raw = read_json(path) if path.is_file() else {}
    unfollowed = [name for name, neutral in _NEUTRAL.items() if raw.get(name) not in (None, [], {}, *neutral)]
    sampling, refused = _usable(_recommended(raw))
    ends = eos_ids(raw.get("eos_token_id"), GENERATION_CONFIG)
    return Generation(ends, sampling, tuple(sorted([*unfollowed, *refused])))


def gguf_generation(fields: Mapping[str, Any]) -> Generation:
    """The recommendation in a GGUF file's `general.sampling.*`; its ends of text are the tokenizer's."""
    names = {name: key for key, name in _GGUF.items()}
    sampling, refused = _usable({name: fields[key] for key, name in _GGUF.items() if key in fields})
    return Generation(sampling=sampling, ignored=tuple(sorted(names[name] for name in refused)))


def _recommended(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`do_sample: false` recommends the likeliest token; the other fields say nothing then, as in transformers."""
    given = {name: raw[name] for name in FIELDS if raw.get(name) is not None}
    if raw.get("do_sample") is False:
        given = {"temperature": 0.0} | {name: given[name] for name in given if name == "repetition_penalty"}
    return given


def _usable(values: Mapping[str, Any]) -> tuple[dict[str, float | int], list[str]]:
    """The values that `SamplingParams` takes, and the names of the others. A whole number may be written as 50.0."""
    usable: dict[str, Any] = {}
    refused: list[str] = []
    for name, value in values.items():
        value: Any = int(value) if name == "top_k" and isinstance(value, float) and value.is_integer() else value
        try:
            SamplingParams(**{name: value})
        except BadSamplingParam:
            refused.append(name)
        else:
            usable[name] = value
    return usable, refused


def checked_sampling(values: Any, where: str) -> dict[str, float | int]:
    """`values`, which `SamplingParams` must take. Raises CheckpointError, naming the field."""
    if not isinstance(values, Mapping) or not values.keys() <= set(FIELDS):
        raise CheckpointError(f"{where} recommends {values!r:.80}; expected some of {', '.join(FIELDS)}")
    try:
        SamplingParams(**values)
    except BadSamplingParam as error:
        raise CheckpointError(f"{where}: {error}") from None
    return dict(values)
