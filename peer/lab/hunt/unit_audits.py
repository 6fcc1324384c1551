"""The rules of exactly-once data: what a log says of units, and what trainers do with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.optim.log.entry import Entry, MalformedRecord
from atoll.optim.log.units import finished, read_units

Fail = Callable[[str, str], None]


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """The units that a chain has counted in its present pass."""

    table: bytes = b""
    done: frozenset[int] = frozenset()


class UnitAudit:
    """The units that the entries of each chain have counted, in the present pass."""

    def __init__(self, total: int, fail: Fail) -> None:
        """Begin a run with so many units of a pass; 0 for one without."""
        self._total = total
        self._fail = fail
        self._after: dict[bytes, _Counted] = {}

    def decided(self, name: str, entry: Entry) -> None:
        """Take an entry that a machine holds for decided."""
        if self._total == 0 or entry.chain in self._after:
            return
        before = _Counted() if entry.position == 0 else self._after.get(entry.previous_chain)
        if before is None:  # nobody who lives has decided the entry before
            return
        at = f"{name}, entry {entry.epoch, entry.position}"
        try:
            held = finished(entry.members, entry.parts, before.table)
        except MalformedRecord as error:
            self._fail("peers count units that they hold", f"{at}: {error}")
            return
        new = [u for ranges in held.values() for start, stop in ranges for u in range(start, stop)]
        if len({*new}) < len(new) or before.done & {*new}:
            self._fail("no unit counts twice in a pass", f"{at}: {sorted(new)}")
        done = before.done | {*new}
        if read_units(entry.units).number != read_units(before.table).number:
            if len(done) != self._total:
                self._fail("a pass counts all units", f"{at}: {len(done)} of {self._total}")
            done = frozenset()
        self._after[entry.chain] = _Counted(table=entry.units, done=done)
