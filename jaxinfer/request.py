"""The plain-data vocabulary that the doors, the scheduler and the engine speak.

Knows: what a request is, what one step is asked to do, what comes back. Knows nothing of JAX, text or sockets.
Positions and lengths count tokens; times are seconds on `time.monotonic`'s clock.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from jaxinfer.errors import BadSamplingParam

MAX_LOGPROBS = 20
MAX_STOP_IDS = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_CHOICES = 64
SEED_BOUND = 2**63
_INT_MAX = 2**31 - 1


class Bounds(NamedTuple):
    """What a number may be; `above_low` where the lowest itself is refused."""

    low: float
    high: float
    above_low: bool = False


WHOLE_BOUNDS = {
    "max_tokens": Bounds(1, _INT_MAX),
    "min_tokens": Bounds(0, _INT_MAX),  # and no more than max_tokens
    "top_k": Bounds(0, _INT_MAX),
    "seed": Bounds(0, SEED_BOUND - 1),
    "n": Bounds(1, MAX_CHOICES),
    "logprobs": Bounds(0, MAX_LOGPROBS),
}
REAL_BOUNDS = {
    "temperature": Bounds(0.0, 100.0),
    "top_p": Bounds(0.0, 1.0, above_low=True),
    "min_p": Bounds(0.0, 1.0),
    "repetition_penalty": Bounds(0.01, 100.0),  # logits over 1e-40 are infinite
    "presence_penalty": Bounds(-100.0, 100.0),
    "frequency_penalty": Bounds(-100.0, 100.0),
}
"""Of the fields of SamplingParams, by name."""


class FinishReason(StrEnum):
    """Why a choice ended; each choice ends exactly once."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


Sampling = Literal["none", "checkpoint"]
"""Whose sampling parameters hold where a request leaves them open: ours, which change nothing, or the checkpoint's."""


def _check_int(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadSamplingParam(f"{name} is {value!r:.80}; expected a whole number from {low} to {high}")


def _is_few(values: object, most: int) -> bool:
    return isinstance(values, Collection) and not isinstance(values, str | bytes) and len(values) <= most


def _check_float(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not low <= value <= high  # false for NaN and the infinities
        or (open_low and value == low)
    ):
        bracket = "above" if open_low else "from"
        raise BadSamplingParam(f"{name} is {value!r:.80}; expected a number {bracket} {low} to {high}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when to stop.

    The defaults sample from the model's own distribution. `temperature=0` is greedy: the highest logit, the lowest id
    on a tie. `top_k=0`, `top_p=1`, `min_p=0` switch those filters off. Penalties: repetition divides or multiplies the
    logits of every token in prompt and output (CTRL, arXiv 1909.05858); presence and frequency subtract from those in
    the output, as in OpenAI's API. They act at temperature 0 too. `logprobs=k` returns the chosen token's log-softmax
    of the raw logits and those of the k best. `ignore_eos` goes on past the model's end-of-text ids, and
    `min_tokens` forbids every kind of stop before that many tokens.

    Raises BadSamplingParam, naming the field, for anything out of range.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, bounds in WHOLE_BOUNDS.items():
            value = getattr(self, name)
            if value is not None or name not in ("seed", "logprobs"):
                _check_int(name, value, bounds.low, bounds.high)
        for name, bounds in REAL_BOUNDS.items():
            _check_float(name, getattr(self, name), bounds.low, bounds.high, open_low=bounds.above_low)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if not isinstance(self.ignore_eos, bool):
            raise BadSamplingParam(f"ignore_eos is {self.ignore_eos!r}; expected true or false")
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        if not _is_few(self.stop, MAX_STOP_STRINGS):
            raise BadSamplingParam(f"stop is {self.stop!r:.80}; expected at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
                raise BadSamplingParam(f"stop holds {text!r:.80}; expected strings of 1 to {MAX_STOP_CHARS} characters")
        if not _is_few(self.stop_token_ids, MAX_STOP_IDS // 2):
            raise BadSamplingParam(
                f"stop_token_ids is {self.stop_token_ids!r:.80}; expected at most {MAX_STOP_IDS // 2} ids"
            )
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, 2**31 - 1)

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise BadSamplingParam(f"logit_bias is {self.logit_bias!r:.80}; expected numbers by token id")
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias key", token, 0, 2**31 - 1)
            _check_float(f"logit_bias[{token}]", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """True where the highest logit wins: temperature 0, or a top_k of one."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def needs_history(self) -> bool:
        """True where the device must know the slot's tokens or biases before it may sample for it."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One admitted request: prompt ids already tokenised, parameters already checked against the model.

    `seed` is never None here (an unseeded request got a fresh one at the door). `stop_ids` is the union of the model's
    end-of-text ids (none of them with `ignore_eos`) and the caller's `stop_token_ids`; at most MAX_STOP_IDS. `deadline`
    and `arrival` are `time.monotonic` seconds. A higher `priority` is planned earlier. `cache_salt` separates prefix
    caches: prompts share pages only under an equal salt.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    deadline: float | None = None
    priority: int = 0
    cache_salt: str = ""


# ---- what comes back -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One chosen token. `logprob` and `top` (id, log-probability; best first) are None and () unless asked for.

    A token of -1 says that the row's logits were no numbers: the scheduler ends that choice with ERROR. No other row of
    the step is touched by it.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: waiting in the queue; arrival to first token (TTFT); from token to token (ITL), one entry per gap."""

    queue: float
    ttft: float
    itl: tuple[float, ...] = ()

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; 0.0 where there is only one."""
        return sum(self.itl) / len(self.itl) if self.itl else 0.0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What the scheduler's loop delivers for one choice: new tokens, or its end, or both.

    With `finish` come `usage` and `timing` (always), and `stop_id` where a stop id ended it: that id is the last of
    `tokens`. `error` holds a message where finish is ERROR.
    """

    request_id: str
    choice: int
    tokens: tuple[SampledToken, ...] = ()
    finish: FinishReason | None = None
    stop_id: int | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of the output with its log-probability, its bytes, and the best alternatives."""

    token: int
    logprob: float
    bytes: bytes
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one choice's output as a door sends it; joined, `text` equals the one-shot text.

    The last Delta of a choice has `finish`, `usage` and `timing`; `stop_reason` is the stop string or stop id that
    ended it, None for an end-of-text id, a length or an abort.
    """

    choice: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    error: str = ""
