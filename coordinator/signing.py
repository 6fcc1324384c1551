"""The highest epoch that the run's key has signed, kept apart from the log.

    epoch.signed    a number in ASCII, -1 before the first epoch; next to keys.json, 0600

A log can be lost, or restored from an old copy. A coordinator that then took the log's word would
sign an epoch of a number that peers hold already, with another base: two logs of one run. So the
number is on disk, synced, before a signature leaves, and nothing at or below it is signed again.

Exceptions:

    RuntimeError
      SignedAlready    an epoch at or below the highest one that was signed
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from atoll.optim.log.entry import Epoch, epoch_payload

SIGNED_FILE = "epoch.signed"
NONE_SIGNED = -1


class SignedAlready(RuntimeError):
    """The run's key has signed this epoch or a later one; signing it again would split the run."""


class EpochSigner:
    """Signs epochs with the run's key, each number once and in rising order."""

    def __init__(self, path: Path, sign: Callable[[bytes], bytes]) -> None:
        """Read the highest number; `sign` signs with the run's key."""
        self._path = path
        self._sign = sign
        self.highest: int | None = read_signed(path)
        """The highest epoch that was signed, -1 before the first; None if that is not known."""

    def note(self, epoch: int) -> None:
        """Keep an epoch that was signed, unless a higher one is known."""
        if self.highest is None or epoch > self.highest:
            _write(self._path, epoch)
            self.highest = epoch

    def sign(self, payload: bytes) -> bytes:
        """Sign an epoch's payload (`epoch_payload`).

        Raises:
            SignedAlready: its number was signed before.
        """
        epoch = Epoch.decode(payload.removeprefix(epoch_payload(b""))).epoch
        if self.highest is not None and epoch <= self.highest:
            raise SignedAlready(
                f"expected an epoch above {self.highest}, which the run's key has signed, got "
                f"{epoch}; fetch the newer epoch from peers first"
            )
        # First on disk: a crash between the two skips a number, which harms nothing.
        self.note(epoch)
        return self._sign(payload)


def read_signed(path: Path) -> int | None:
    """Return the highest epoch that was signed, -1 before the first; None if not known."""
    with contextlib.suppress(OSError, ValueError):  # damaged is the same as missing: ask the peers
        return max(NONE_SIGNED, int(path.read_text(encoding="ascii")))
    return None


def _write(path: Path, epoch: int) -> None:
    partial = path.with_name(f".{path.name}.new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"%d\n" % epoch)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name must survive a loss of power too
    finally:
        os.close(folder)
