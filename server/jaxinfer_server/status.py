"""Exceptions to gRPC statuses on the server, and back on the client.

Knows: which status code each exception of `jaxinfer.errors` has. The exception's name and the retry hint travel in
trailing metadata. Does not know what was asked.
"""

from dataclasses import dataclass
from typing import Any

import grpc

from jaxinfer import errors
from jaxinfer.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFault,
    JaxInferError,
    Overloaded,
    RequestError,
    Unavailable,
)

NAME_KEY = "jaxinfer-error"
RETRY_KEY = "retry-after-ms"

_CODES: tuple[tuple[type[JaxInferError], grpc.StatusCode], ...] = (  # subclasses before their parents
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Cancelled, grpc.StatusCode.CANCELLED),
    (EngineFault, grpc.StatusCode.INTERNAL),
)


@dataclass(frozen=True, slots=True)
class Status:
    """What a failed call tells its client."""

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...] = ()


def status_of(error: BaseException) -> Status:
    """The status that a client sees for `error`.

    Only our own exceptions carry messages meant for callers. Anything else may hold a path of this machine: it becomes
    INTERNAL with a fixed text, and the server's log has the rest.
    """
    for kind, code in _CODES:
        if isinstance(error, kind):
            return Status(code, str(error), _metadata(error))
    return Status(grpc.StatusCode.INTERNAL, "internal error; the server's log has more", ((NAME_KEY, "EngineFault"),))


def _metadata(error: JaxInferError) -> tuple[tuple[str, str], ...]:
    name = (NAME_KEY, type(error).__name__)
    if isinstance(error, Overloaded):
        return (name, (RETRY_KEY, str(max(1, round(error.retry_after * 1000)))))
    return (name,)


def error_of(call: grpc.RpcError) -> JaxInferError:
    """The exception that a failed call stands for.

    A status from somewhere else (a proxy, gRPC itself) has no name in its metadata and becomes the nearest kind;
    JaxInferError where there is none.
    """
    assert isinstance(call, grpc.Call)
    code, details = call.code(), call.details() or ""
    pairs: Any = call.trailing_metadata() or ()  # grpcio's own type is no sequence
    metadata: dict[str, Any] = dict(pairs)
    kind = getattr(errors, metadata.get(NAME_KEY, ""), None)
    if not (isinstance(kind, type) and issubclass(kind, JaxInferError)):
        kind = next((kind for kind, known in _CODES if known is code), JaxInferError)
    if kind is JaxInferError:
        return JaxInferError(f"{code.name}: {details}")
    if issubclass(kind, Overloaded):
        return kind(details, retry_after=_seconds(metadata.get(RETRY_KEY, "1000")))
    return kind(details)


def _seconds(milliseconds: str) -> float:
    return int(milliseconds) / 1000 if milliseconds.isdecimal() else 1.0
