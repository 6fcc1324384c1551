"""TCP addresses written as 'host:port'."""

from __future__ import annotations

import ipaddress


def split_address(value: str) -> tuple[str, int]:
    """Split 'host:port' (IPv6 as '[::1]:7700'). Raises ValueError."""
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("expected 'host:port' with a port from 0 to 65535, e.g. '0.0.0.0:7700'")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_public(host: str) -> bool:
    """Return whether an IP address can be reached from the whole internet; False for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_global
    except ValueError:
        return False
