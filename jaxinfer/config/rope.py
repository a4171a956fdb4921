"""Rotary position embedding: how fast each pair of features turns, and how a longer context stretches it."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxinfer.config.checks import require, require_flag, require_number, require_whole

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and how it is stretched.

    linear divides every phase by `factor` (arXiv 2306.15595). dynamic raises theta as a position passes
    `original_context`. llama3 divides low frequencies only, between `low_freq_factor` and `high_freq_factor`
    wavelengths of `original_context`. yarn (arXiv 2309.00071) blends divided and plain frequencies between `beta_slow`
    and `beta_fast` turns of `original_context`, the bounds rounded outward with `truncate`. longrope (arXiv 2402.13753)
    divides each frequency by its own of `long_factors`, or of `short_factors` where no sequence may grow past
    `original_context`.
    attention_factor multiplies cosine and sine. dim: how many features of a head turn, the first ones; None for all.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8_192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    dim: int | None = None

    def __post_init__(self) -> None:
        require_number(self, "theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        require_number(self, "attention_factor")
        require_whole(self, "original_context")
        require_flag(self, "truncate")
        require(
            self.kind in get_args(RopeKind), f"rope kind is {self.kind!r:.80}; expected one of {get_args(RopeKind)}"
        )
        require(self.factor >= 1, f"rope factor is {self.factor}; expected 1 or more")
        require(
            self.kind != "llama3" or self.low_freq_factor < self.high_freq_factor,
            f"rope low_freq_factor {self.low_freq_factor} is not below high_freq_factor {self.high_freq_factor}",
        )
        require(
            self.beta_slow <= self.beta_fast,
            f"rope beta_slow {self.beta_slow} is above beta_fast {self.beta_fast}",
        )
        require(
            self.kind != "yarn" or (self.theta > 1 and self.beta_slow >= 1e-6),
            f"rope of kind yarn has theta {self.theta} and beta_slow {self.beta_slow}; expected more than 1, and 1e-6 "
            "or more",
        )
        require(
            self.dim is None or (isinstance(self.dim, int) and 0 < self.dim <= 2**16 and self.dim % 2 == 0),
            f"rope dim is {self.dim!r:.80}; expected an even number of features, 65536 at the most",
        )
        self._check_factors()

    def _check_factors(self) -> None:
        for name in ("short_factors", "long_factors"):
            value: Any = getattr(self, name)
            numbers = isinstance(value, tuple) and all(isinstance(x, int | float) and 0 < x < math.inf for x in value)
            require(numbers, f"rope {name} is {value!r:.80}; expected positive numbers")
            require(
                bool(value) == (self.kind == "longrope"), f"rope {name} is {value!r:.80} for a rope of kind {self.kind}"
            )
        require(
            len(self.short_factors) == len(self.long_factors),
            f"rope has {len(self.short_factors)} short_factors and {len(self.long_factors)} long_factors",
        )

    def turning(self, head_dim: int) -> int:
        """Features of a head of `head_dim` that turn."""
        return head_dim if self.dim is None else self.dim
