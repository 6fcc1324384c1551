"""Parts of a reduction tree in hand: at a relay of a row, and at the owner of a part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.peer.rounds.allreduce.owned import OwnedPart
from atoll.peer.rounds.allreduce.sums import TreeReducer
from atoll.peer.rounds.messages import PartDone

LOOKS = 4  # in the time between two signs of life, at who is due
LATE_STALLS = 0.5  # that members have to come by themselves, once their row's sums come no more
# Of the deadline: relays wait less for slow senders than owners do, and owners less for slow
# relays, so that who is slow is left out alone.
MEMBERS_SHARE, ROWS_SHARE = 0.25, 0.375


@dataclass(kw_only=True)
class RelayedPart(OwnedPart):
    """A part that this peer adds up for its row; what members get comes from the owner."""

    alive_s: float
    came_back: list[bytes] = field(default_factory=list)
    """results, as the owner sent them"""
    final: PartDone | None = None
    lost: str = ""
    """why no more results will come"""

    @property
    def results(self) -> list[bytes]:
        """See `OwnedPart`."""
        return self.came_back

    def check(self) -> None:
        """See `OwnedPart`."""
        if self.lost:
            raise Refused(RefusalCode.OWNER_LOST, f"the relay lost the owner: {self.lost}")

    async def result(self, part: int, generation: int) -> PartDone:
        """See `OwnedPart`; the owner's word comes after the last of its results."""
        while self.final is None:
            self.check()
            await self.await_change(self.alive_s)
        return self.final

    async def await_sums(self, sent: int) -> bool:
        """Whether there are more sums than were sent, or something changed, within a while."""
        return len(self.reducer.frames) > sent or await self.await_change(self.alive_s)


@dataclass(kw_only=True)
class TreePart(OwnedPart):
    """A part that this peer owns: its own row's members come by themselves, others in sums."""

    tree: TreeReducer
    """the reducer"""
    relays: dict[int, int]
    """rows whose relay has not come yet, and who it is"""
    late_s: float
    rows_by: float
    """until when sums have to be complete; on the context's clock"""
    ended: set[int] = field(default_factory=set)
    """members of other rows whose own stream came and ended"""
    due: dict[int, float] = field(default_factory=dict)
    """until when members that are in no sums any more have to come by themselves"""

    async def add_sums(self, row: int, message: memoryview) -> None:
        """Take sums of a row; raises CellRefused where they cannot be."""
        async with self.lock:
            await self._do(partial(self._add_sums, row, message))

    async def dissolve(self, row: int) -> None:
        """Expect no more sums of a row: its members come by themselves."""
        self.relays.pop(row, None)
        async with self.lock:
            await self._do(partial(self._dissolve, row))
        await self.notify()

    async def silent(self, now: float, connect_by: float, gone: Collection[int]) -> set[int]:
        """See `OwnedPart`; a row whose relay is late, or gone, comes by itself."""
        for row, relay in list(self.relays.items()):
            if relay in gone or now >= connect_by:
                self.ended.add(relay)  # who does not come with sums does not come without
                await self.dissolve(row)
        if now >= self.rows_by:
            await self._dissolve_all()
        alone = self.tree.alone()
        for member in alone - self.came:
            self.due.setdefault(member, max(connect_by, now + self.late_s))
        late = {m for m in alone - self.came if m in gone or now >= self.due[m]}
        return late | (alone & self.ended) | await super().silent(now, connect_by, gone)

    async def await_end(self, timeout_s: float) -> None:
        """See `OwnedPart`; looked at more often, since one deadline follows another."""
        await super().await_end(timeout_s / LOOKS)

    async def give_up(self) -> set[int]:
        """See `OwnedPart`."""
        await self._dissolve_all()
        return self.tree.waiting_for

    async def _dissolve_all(self) -> None:
        for row in self.tree.open_rows:
            await self.dissolve(row)

    def _add_sums(self, row: int, message: memoryview) -> None:
        self.tree.add_sums(row, message)
        self.tree.advance()

    def _dissolve(self, row: int) -> None:
        self.tree.dissolve(row)
        self.tree.advance()
