"""Failures of a call to the coordinator.

Exceptions:

    CoordinatorError
      CoordinatorUnreachable   no answer in time; a retry may help
      WrongCertificate         another server answers at the invite's address
      CoordinatorRefused       the coordinator refused; `code` is the gRPC status
        NotWelcome             missing or wrong token, proof or session
          Evicted              the organiser has put this peer out
        WrongRunOrVersion      it serves another run, or another protocol version
        Busy                   too many calls; a retry helps
        NotThere               it does not hold the requested entry or snapshot
        Invalid                it rejected what was sent
      BadReply                 its reply is malformed; the text names the fault
"""

from __future__ import annotations

import grpc


class CoordinatorError(Exception):
    """A call to the coordinator failed."""


class CoordinatorUnreachable(CoordinatorError):
    """The coordinator did not answer in time."""


class WrongCertificate(CoordinatorError):
    """A server with another certificate answered."""


class CoordinatorRefused(CoordinatorError):
    """The coordinator refused; `code` is for programs, `message` for people."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotWelcome(CoordinatorRefused):
    """The token, the proof of identity or the session was rejected."""


class Evicted(NotWelcome):
    """The organiser has put this peer out of the run."""


class WrongRunOrVersion(CoordinatorRefused):
    """The coordinator serves another run or another protocol version."""


class Busy(CoordinatorRefused):
    """Too many calls from this peer or its address; worth another try later."""


class NotThere(CoordinatorRefused):
    """The coordinator does not hold the entry or snapshot."""


class Invalid(CoordinatorRefused):
    """The coordinator rejected what was sent."""


class BadReply(CoordinatorError):
    """The reply is malformed."""


_REFUSALS: dict[grpc.StatusCode, type[CoordinatorRefused]] = {
    grpc.StatusCode.UNAUTHENTICATED: NotWelcome,
    grpc.StatusCode.PERMISSION_DENIED: NotWelcome,
    grpc.StatusCode.ABORTED: Evicted,
    grpc.StatusCode.FAILED_PRECONDITION: WrongRunOrVersion,
    grpc.StatusCode.NOT_FOUND: NotThere,
    grpc.StatusCode.INVALID_ARGUMENT: Invalid,
    grpc.StatusCode.UNIMPLEMENTED: WrongRunOrVersion,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Busy,
}
_UNREACHABLE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


def from_grpc(error: grpc.aio.AioRpcError, address: str) -> CoordinatorError:
    """Return the error that a failed gRPC call stands for."""
    code, details = error.code(), (error.details() or "no details")[:500]
    if code in _UNREACHABLE:
        return CoordinatorUnreachable(f"{address}: {_why(code, details)}")
    # gRPC has no other sign of a reply above its limit: servers refuse with the same code.
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return BadReply(f"{address}: {details}")
    return _REFUSALS.get(code, CoordinatorRefused)(code, details)


def _why(code: grpc.StatusCode, details: str) -> str:
    # gRPC puts the cause last, after the layers that the error passed through.
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    return details.rpartition(":")[2].strip().lower() or details
