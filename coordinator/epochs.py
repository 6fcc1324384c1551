"""When a run's epochs open: the first with enough peers, later ones when the run stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from atoll.coordinator.follower import Follower
from atoll.coordinator.members import (
    MAX_MEMBERS,
    Member,
    Progress,
    Retired,
    can_decide,
    common_position,
    electable,
)
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.status import PeerStatus
from atoll.optim.log.entry import Elector, choose_electors


class Epochs:
    """Opens epochs at the follower's head. Times are of any steady clock."""

    def __init__(
        self, follower: Follower, *, min_peers: int, say: Callable[[Level, str], None]
    ) -> None:
        """`min_peers` hold the first state before the first epoch; `say` tells people."""
        self._follower = follower
        self._min_peers = min_peers
        self._say = say
        self._progress = Progress()
        self._retired: Retired = {}
        self._behind_told = False

    def retire(self, status: PeerStatus) -> None:
        """Take the word of a peer that leaves: from where it stands on it has voted for nothing."""
        if len(self._retired) >= MAX_MEMBERS:
            del self._retired[next(iter(self._retired))]
        self._retired[status.peer_id, status.incarnation] = status.epoch, status.position

    def note(self, alive: Sequence[Member], now_s: float) -> None:
        """Take how far the run is, by those who are in touch."""
        head = self._follower.head
        furthest = common_position(alive, epoch=head.epoch) if self._follower.is_open else 0
        self._progress.note(max(head.position, furthest), now_s)

    def is_stalled(self, now_s: float, round_s: float) -> bool:
        """Whether the run stands still, or did until an epoch was opened for it."""
        return self._progress.reopened > 0 or self._progress.is_stalled(now_s, round_s)

    async def look(self, alive: Sequence[Member], now_s: float, round_s: float) -> None:
        """Open an epoch where one is due; `round_s` is what a round takes."""
        if not self._follower.is_open:
            if len(electable(alive, epoch=None)) >= self._min_peers:
                await self.open(alive, now_s)
        elif not electable(alive, epoch=self._follower.head.epoch):
            self._progress.pause(now_s)
        elif not self._can_decide():
            await self.open(alive, now_s, because=": electors left")
        elif self._progress.is_stalled(now_s, round_s):
            await self._open_if_whole(alive, now_s)

    def _can_decide(self) -> bool:
        """Whether those who have not left can be a quorum, as far as leaving peers said.

        If not, nothing is decided at our head, and nobody stands beyond it: an epoch that opens
        there voids nothing, so it need not wait.
        """
        electorate, head = self._follower.electorate, self._follower.head
        return can_decide(electorate, self._retired, (head.epoch, head.position))

    async def open(self, alive: Sequence[Member], now_s: float, because: str = "") -> bool:
        """Open an epoch with those who can vote; False if nobody can."""
        again = self._follower.is_open
        peers = electable(alive, epoch=self._follower.head.epoch if again else None)
        if not peers:
            return False
        electors = choose_electors(
            [Elector(peer_id=p.peer_id, incarnation=p.incarnation) for p in peers]
        )
        self._retired.clear()  # who left can't become an elector of the new one
        opened = await asyncio.to_thread(self._follower.open_epoch, electors)
        self._progress.restart(now_s, again=again and not because)
        text = f"epoch {opened.epoch} opened at position {opened.base_position}"
        plural = "" if len(electors) == 1 else "s"
        self._say("info", f"{text} with {len(electors)} peer{plural}{because}")
        return True

    async def _open_if_whole(self, alive: Sequence[Member], now_s: float) -> None:
        """An epoch at our head voids what lies beyond it: not while half of the trainers hold more.

        Nobody could come back from that: peers do not keep what they had so long ago.
        """
        head = self._follower.head
        ahead = common_position(alive, epoch=head.epoch) - head.position
        if ahead <= 0:
            await self.open(alive, now_s)
        elif not self._behind_told:
            text = f"{ahead} rounds are missing here: no new epoch before they are fetched"
            self._say("warning", f"the run stands still, but {text}")
        self._behind_told = ahead > 0
