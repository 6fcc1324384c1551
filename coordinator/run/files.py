"""Files of a coordinator that others read too, and writing small ones.

A crash leaves the file of before, or the new one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

KNOWN_FILE = "node.known"
"""Last addresses of peers: the coordinator's node finds them again, and invites may list them."""


def replace_private(path: Path, data: bytes) -> None:
    """Write a file with mode 0600 and its name, both on the disk when this returns.

    Raises:
        OSError: it cannot be written; the file of before is still there.
    """
    partial = path.with_name(f".{path.name}.new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # else a loss of power may bring the file of before back
    finally:
        os.close(folder)


def known_peers(folder: Path) -> tuple[str, ...]:
    """Return the multiaddrs that `keep_known_peers` wrote; none if they cannot be read."""
    try:
        return tuple((folder / KNOWN_FILE).read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError):
        return ()


def keep_known_peers(folder: Path, addresses: Sequence[str]) -> None:
    """Write multiaddrs of peers, on the disk when this returns.

    A coordinator that is restored where nobody looks for it knows no other peers.

    Raises:
        OSError: as `replace_private`.
    """
    replace_private(folder / KNOWN_FILE, "\n".join(addresses).encode("utf-8"))
