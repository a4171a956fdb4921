"""What a command line asks to compile: kernels at their shapes, steps of models."""

from collections.abc import Sequence

from aot.kernels import Case, cases
from aot.steps import KINDS, Serving, StepJob, config_of

Job = Case | StepJob


def named(given: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """What was asked for, all of it by default."""
    return () if given == ["none"] else tuple(given or known)


def select(
    kernels: tuple[str, ...], models: tuple[str, ...], dtypes: tuple[str, ...], shape: str, form: str
) -> list[Job]:
    """Cases of a form of the kernels, and both steps of the models.

    Raises ValueError for what does not exist, and for nothing at all.
    """
    jobs: list[Job] = [case for name in kernels for case in cases(name, dtypes, shape, form)]
    for model in models:
        config_of(model)
        jobs += [StepJob(model, kind, Serving()) for kind in KINDS]
    require_some(jobs, shape)
    return jobs


def require_some(jobs: Sequence[Job], shape: str) -> None:
    """Raises ValueError where nothing was selected."""
    if not jobs:
        raise ValueError(f"nothing to compile: no kernel with a shape that has {shape!r} in its name, and no model")
