"""What the scheduler asks of the engine: two calls, so that a step is dispatched before the last one is fetched."""

from typing import Protocol, TypeVar

from jaxinfer.plan import Limits, StepPlan, StepTokens

Handle = TypeVar("Handle")


class Runner(Protocol[Handle]):
    """Carries plans out, in the order of the `dispatch` calls. Called from one thread only."""

    @property
    def limits(self) -> Limits:
        """What a plan may ask for; fixed."""
        ...

    def dispatch(self, plan: StepPlan) -> Handle:
        """Start the step and return at once. Reads all of `plan` before it returns.

        A decode row takes its input token from the device, so the step before need not have been fetched.
        """
        ...

    def fetch(self, handle: Handle) -> StepTokens:
        """Wait for the step's tokens. Each handle is fetched once, in the order of dispatch."""
        ...
