"""The coordinator's own relocation: signed at a start at which its addresses have changed.

    relocation.signed       the newest record (run/relocation.py); beside keys.json, 0600
    relocation.restore      the number of the restore from copies that made this directory
    relocation.elsewhere    a newer record, of another coordinator; whoever rules it out by making
                            it relocation.signed signs the next one

Whoever starts the run's state directory on another machine moves the coordinator by that: nothing
else has to be ordered. The first start signs one too, as a later one may have nothing but the keys.
Copies leave these files out, so that a restored coordinator signs anew, with the number of its
restore: the one that it replaces may have moved since the copy, or may be starting just now.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from atoll.coordinator import notices
from atoll.coordinator.run.files import replace_private
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.notice import Report
from atoll.coordinator.run.relocation import Relocation, RelocationInvalid, serial_at

RELOCATION_FILE = "relocation.signed"
RESTORE_FILE = "relocation.restore"
ELSEWHERE_FILE = "relocation.elsewhere"


def keep_restore(folder: Path, number: int) -> None:
    """Note the number of the restore that makes a directory, synced."""
    replace_private(folder / RESTORE_FILE, str(number).encode())


def own_record(folder: Path, invite: Invite, sign: Callable[[bytes], bytes], now_s: float) -> bytes:
    """Return the record of where this coordinator is; sign one if the last says otherwise.

    Args:
        folder: the coordinator's, with the last record; a damaged one is as good as none.
        invite: the run's, with the addresses of this start.
        sign: signs with the run's key.
        now_s: seconds since 1970.

    Raises:
        OSError: a new record cannot be written.
    """
    path, last = folder / RELOCATION_FILE, 0
    with suppress(FileNotFoundError, RelocationInvalid):
        kept = path.read_bytes()
        before = Relocation.open(kept, invite.run_key, invite.run_id)
        if (before.addresses, before.bootstrap) == (invite.addresses, invite.bootstrap):
            return kept
        last = before.serial
    least = serial_at(now_s, restores=_restores(folder))
    now = Relocation(
        serial=max(last + 1, least), addresses=invite.addresses, bootstrap=invite.bootstrap
    )
    record = now.sign(invite.run_id, sign)
    replace_private(path, record)
    return record


def _restores(folder: Path) -> int:
    try:
        return int((folder / RESTORE_FILE).read_bytes()[:6])
    except (OSError, ValueError):
        return 0


class OwnPlace:
    """The addresses that a coordinator tells its peers, and its watch for another coordinator."""

    def __init__(self, folder: Path, invite: Invite, record: bytes, report: Report) -> None:
        """Tell peers this record; `report` takes what the organiser has to know.

        Another coordinator's record is kept in the `folder`.

        Raises:
            RelocationInvalid: it is none of this run.
        """
        self.record = record
        """The coordinator's own."""
        self._folder = folder
        self._invite = invite
        self._highest = self._open(record).serial - 1  # peers may follow another of the same serial
        self._report = report

    def take(self, record: bytes) -> bool:
        """Report a newer record, which is another coordinator's; follow none.

        Raises:
            RelocationInvalid: it is none of this run.
        """
        if record == self.record:
            return False
        other = self._open(record)
        if other.serial > self._highest:  # once each
            self._highest = other.serial
            with suppress(OSError):  # a full disk; the report counts
                replace_private(self._folder / ELSEWHERE_FILE, record)
            elsewhere = notices.coordinator_elsewhere(
                addresses=other.addresses, file=ELSEWHERE_FILE, becomes=RELOCATION_FILE
            )
            self._report("error", elsewhere)
        return False

    def _open(self, record: bytes) -> Relocation:
        return Relocation.open(record, self._invite.run_key, self._invite.run_id)
