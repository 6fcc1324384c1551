"""TCP ports of this machine, tried before p2pd is, which would exit without a reason.

Exceptions:

    ValueError
      PortInUse     an address cannot be listened on
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable

_TCP = re.compile(r"/ip[46]/(?P<host>[^/]+)/tcp/(?P<port>\d+)")


class PortInUse(ValueError):  # noqa: N818
    """An address that cannot be listened on."""


def free_port(host: str, port: int, *, remedy: str) -> int:
    """Listen for a moment and return the port; for 0, any free one.

    Raises:
        PortInUse: the port is taken, or the host is not this machine's; ends in `remedy`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as server:
            bound: int = server.getsockname()[1]
    except (OSError, OverflowError) as error:
        raise PortInUse(f"cannot listen on {host}:{port} ({_reason(error)}); {remedy}") from None
    return bound


def _reason(error: OSError | OverflowError) -> str:
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno else str(error)
    return "no such port"


def expect_free(listen: Iterable[str], *, remedy: str) -> None:
    """Check the TCP addresses among multiaddrs; port 0 stands for any free one.

    Raises:
        PortInUse: one of them cannot be listened on.
    """
    for found in filter(None, map(_TCP.fullmatch, listen)):
        free_port(found["host"], int(found["port"]), remedy=remedy)
