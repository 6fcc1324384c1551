"""How a talk with the coordinator can fail.

Exceptions:

    CoordinatorError
      CoordinatorUnreachable   no answer in time; trying again may help
      WrongCertificate         another server answers at the invite's address
      CoordinatorRefused       it said no; `code` is the gRPC status
        NotWelcome             no or a wrong token, proof or session
        WrongRunOrVersion      it runs another run, or speaks another version
        NotThere               it does not hold what was asked for
        Invalid                it found what was sent to be wrong
      BadReply                 its answer is not what it should be; says what
"""

from __future__ import annotations

import grpc


class CoordinatorError(Exception):
    """A talk with the coordinator failed."""


class CoordinatorUnreachable(CoordinatorError):  # noqa: N818
    """No answer in time."""


class WrongCertificate(CoordinatorError):  # noqa: N818
    """A server with another certificate."""


class CoordinatorRefused(CoordinatorError):  # noqa: N818
    """The coordinator said no."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        """`code` is for programs, `message` for people."""
        super().__init__(message)
        self.code = code


class NotWelcome(CoordinatorRefused):
    """The token, the proof of identity or the session was not accepted."""


class WrongRunOrVersion(CoordinatorRefused):
    """Another run, or another version of the protocol."""


class NotThere(CoordinatorRefused):
    """An entry or snapshot that the coordinator does not hold."""


class Invalid(CoordinatorRefused):
    """Something that the coordinator found to be wrong."""


class BadReply(CoordinatorError):  # noqa: N818
    """An answer that is not what it should be."""


_REFUSALS: dict[grpc.StatusCode, type[CoordinatorRefused]] = {
    grpc.StatusCode.UNAUTHENTICATED: NotWelcome,
    grpc.StatusCode.PERMISSION_DENIED: NotWelcome,
    grpc.StatusCode.FAILED_PRECONDITION: WrongRunOrVersion,
    grpc.StatusCode.NOT_FOUND: NotThere,
    grpc.StatusCode.INVALID_ARGUMENT: Invalid,
    grpc.StatusCode.UNIMPLEMENTED: WrongRunOrVersion,
}
_UNREACHABLE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


def from_grpc(error: grpc.aio.AioRpcError, address: str) -> CoordinatorError:
    """The error that a failed call means."""
    code, details = error.code(), (error.details() or "no details")[:500]
    if code in _UNREACHABLE:
        return CoordinatorUnreachable(f"{address}: {_why(code, details)}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return BadReply(f"{address}: {details}")
    return _REFUSALS.get(code, CoordinatorRefused)(code, details)


def _why(code: grpc.StatusCode, details: str) -> str:
    """What gRPC names last: what happened, after the layers that it went through."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    return details.rpartition(":")[2].strip().lower() or details
