"""The highest epoch that the run's key has signed, kept apart from the log.

    epoch.signed    "SIGNED" or "SIGNED LEFT" in ASCII, -1 for none; beside keys.json, 0600

LEFT is "?" in a directory that was restored from a copy: later epochs may have left, and numbers up
to SIGNED count as taken, far above all that can have been signed since the copy.

A log can be lost, or restored from an old copy. A coordinator that then took the log's word would
sign an epoch of a number that peers hold already, with another base: two logs of one run. So the
number is on disk, synced, before a signature leaves, and nothing at or below it is signed again.

The second number is the newest epoch whose record can have left for anybody, if that is not the
first: it is raised once the record is in the log, before anybody can read it there. After a crash
between the two, the number in between is skipped, because no peer has it. An epoch that left and is
not in the log is with the peers, however few of them say so.

Exceptions:

    RuntimeError
      SignedAlready    an epoch at or below the highest one that was signed
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from atoll.coordinator.run.files import replace_private
from atoll.optim.log.entry import Epoch, epoch_payload, root_payload

SIGNED_FILE = "epoch.signed"
NONE_SIGNED = -1
UNKNOWN = "?"


class SignedAlready(RuntimeError):
    """The run's key has signed this epoch or a later one; signing it again would split the run."""


class EpochSigner:
    """Signs epochs with the run's key, each number once and in rising order."""

    def __init__(self, path: Path, sign: Callable[[bytes], bytes]) -> None:
        """Read the highest number; `sign` signs with the run's key."""
        self._path = path
        self._sign = sign
        self.highest: int | None
        """The highest epoch that was signed, -1 before the first; None if that is not known."""
        self.left: int | None
        """The highest epoch that can have left; None as above, or after a restore."""
        self.highest, self.left = read_signed(path)

    @property
    def is_restored(self) -> bool:
        """Return whether this is a copy's, which knows no longer what has left since."""
        return self.highest is not None and self.left is None

    def note(self, epoch: int) -> None:
        """Keep an epoch that was signed and is in a log, unless a higher one is known."""
        if self.left is None or epoch > self.left:
            self._keep(epoch if self.highest is None else max(epoch, self.highest), epoch)

    def accept_loss(self, epoch: int) -> None:
        """Expect no epoch above this one in the log; their numbers stay signed."""
        self._keep(epoch if self.highest is None else self.highest, epoch)

    def _keep(self, highest: int, left: int) -> None:
        _write(self._path, highest, left)
        self.highest, self.left = highest, left

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
        self._keep(epoch, NONE_SIGNED if self.left is None else self.left)
        return self._sign(payload)

    def sign_root(self, run_id: bytes, position: int, chain: bytes, root: bytes) -> bytes:
        """Sign the root of a state that this coordinator computed; nothing else opens with it."""
        return self._sign(root_payload(run_id, position, chain, root))


def begin(path: Path) -> None:
    """Write that no epoch was signed, for keys that are about to be made."""
    if read_signed(path) == (None, None):
        _write(path, NONE_SIGNED, NONE_SIGNED)


def restored(path: Path, signed: int) -> None:
    """Write into a restored directory that numbers up to `signed` count as signed."""
    _write(path, signed, None)


def read_signed(path: Path) -> tuple[int | None, int | None]:
    """Return the highest epoch that was signed and the highest that can have left.

    Each is -1 before the first. None if it is not known: damaged is the same as missing.
    """
    with contextlib.suppress(OSError, ValueError):
        signed, *left = path.read_text(encoding="ascii").split()
        highest = max(NONE_SIGNED, int(signed))
        if left == [UNKNOWN]:
            return highest, None
        if len(left) <= 1:
            return highest, min(highest, max(NONE_SIGNED, int(left[0]) if left else highest))
    return None, None


def _write(path: Path, signed: int, left: int | None) -> None:
    told = [signed] if signed == left else [signed, UNKNOWN if left is None else left]
    replace_private(path, " ".join(map(str, told)).encode("ascii") + b"\n")
