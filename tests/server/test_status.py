"""An exception of the server is the same exception at the client, and nothing else gets out."""

import grpc
import pytest

from jaxinfer import errors
from jaxinfer_server.status import error_of, status_of

PUBLIC = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(
        kind, (errors.RequestError, errors.Overloaded, errors.Unavailable, errors.Cancelled, errors.EngineFault)
    )
]


class FailedCall(grpc.RpcError, grpc.Call):
    """What grpcio raises at a client."""

    def __init__(self, code, details, metadata=()):
        self._parts = (code, details, metadata)

    def code(self):
        return self._parts[0]

    def details(self):
        return self._parts[1]

    def trailing_metadata(self):
        return self._parts[2]

    def initial_metadata(self):
        return ()

    def is_active(self):
        return False

    def time_remaining(self):
        return None

    def cancel(self):
        return False

    def add_callback(self, callback):
        return False


@pytest.mark.parametrize("kind", PUBLIC)
def test_every_public_error_makes_the_round_trip(kind):
    status = status_of(kind("what it got"))
    back = error_of(FailedCall(status.code, status.details, status.metadata))
    assert type(back) is kind
    assert str(back) == "what it got"


def test_the_retry_hint_makes_the_round_trip():
    status = status_of(errors.Overloaded("full", retry_after=2.5))
    assert ("retry-after-ms", "2500") in status.metadata
    assert error_of(FailedCall(status.code, status.details, status.metadata)).retry_after == 2.5


@pytest.mark.parametrize(
    "error", [ValueError("/etc/secret"), OSError(2, "no", "/etc/secret"), errors.ConfigError("/etc")]
)
def test_other_errors_say_nothing_of_the_machine(error):
    status = status_of(error)
    assert status.code is grpc.StatusCode.INTERNAL
    assert "etc" not in status.details


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.RequestError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, errors.Cancelled),
        (grpc.StatusCode.UNIMPLEMENTED, errors.JaxInferError),
    ],
)
def test_a_status_without_a_name_becomes_the_nearest_kind(code, kind):
    for metadata in ((), (("jaxinfer-error", "os"),), (("retry-after-ms", "soon"),)):
        assert type(error_of(FailedCall(code, "words", metadata))) is kind
