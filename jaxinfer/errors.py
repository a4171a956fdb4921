"""Every exception that jaxinfer raises on purpose.

    JaxInferError
    ├── ConfigError            a field, or a pair of fields, cannot work
    ├── CheckpointError        a missing, surplus or misshapen tensor, or a damaged file
    ├── RequestError           the caller's fault            INVALID_ARGUMENT
    │   ├── PromptTooLong
    │   └── BadSamplingParam
    ├── Overloaded             the queue is full             RESOURCE_EXHAUSTED
    ├── Unavailable            draining, or not yet ready    UNAVAILABLE
    ├── Cancelled              the caller gave up            CANCELLED
    │   └── DeadlineExceeded   the caller's deadline passed  DEADLINE_EXCEEDED
    └── EngineFault            an invariant of ours broke    INTERNAL, and readiness fails

A message says what it got, what it expected and what to do. It never holds a traceback, and an error that a client
sees never holds a path of the server's machine.
"""


class JaxInferError(Exception):
    """The root: catch this to catch everything that jaxinfer raises on purpose."""


class ConfigError(JaxInferError):
    """A configuration field, or a pair of fields, cannot work."""


class CheckpointError(JaxInferError):
    """A checkpoint is damaged, or its tensors are not the ones its configuration asks for."""


class RequestError(JaxInferError):
    """The caller asked for something that cannot be done."""


class PromptTooLong(RequestError):
    """The prompt fits neither the context nor the page pool, whatever else is running."""


class BadSamplingParam(RequestError):
    """A sampling parameter is out of range; the message names it."""


class Overloaded(JaxInferError):
    """The waiting queue is full; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(JaxInferError):
    """The server is starting or draining and takes no new request."""


class Cancelled(JaxInferError):
    """The caller gave the request up."""


class DeadlineExceeded(Cancelled):
    """The caller's deadline passed before the request finished."""


class EngineFault(JaxInferError):
    """An invariant of ours broke; nothing more can be served."""
