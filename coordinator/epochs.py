"""Opening epochs: the first with enough peers, later ones when the run is stalled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.coordinator.policies import (
    Retired,
    StallClock,
    can_decide,
    common_position,
    electable,
)
from atoll.coordinator.presence import MAX_PEERS, KnownPeer
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.status import PeerStatus
from atoll.optim.log.entry import Elector, choose_electors
from atoll.optim.log.replica import LiveReplica


class Epochs:
    """Opens epochs at the head of the coordinator's replica. Times are of any steady clock."""

    def __init__(
        self,
        replica: LiveReplica,
        *,
        sign: Callable[[bytes], bytes],
        min_peers: int,
        report: Callable[[Level, str], None],
    ) -> None:
        """Open epochs of a replica.

        Args:
            replica: the coordinator's replica.
            sign: signs with the run's key.
            min_peers: peers that must hold the first state before the first epoch opens.
            report: logs an event.
        """
        self._replica = replica
        self._sign = sign
        self._min_peers = min_peers
        self._report = report
        self._progress = StallClock()
        self._retired: Retired = {}
        self._behind_reported = False

    @property
    def _is_open(self) -> bool:
        return self._replica.opened is not None

    def retire(self, status: PeerStatus) -> None:
        """Note that a peer resigned: it has not voted from its position on, and never will."""
        if len(self._retired) >= MAX_PEERS:  # anyone can invent incarnations
            del self._retired[next(iter(self._retired))]
        self._retired[status.peer_id, status.incarnation] = status.epoch, status.position

    def note(self, alive: Sequence[KnownPeer], now_s: float) -> None:
        """Note how far the run is, by the peers online."""
        head = self._replica.head
        furthest = common_position(alive, epoch=head.epoch) if self._is_open else 0
        self._progress.note(max(head.position, furthest), now_s)

    def is_stalled(self, now_s: float, round_s: float) -> bool:
        """Return whether the run is stalled, or was until an epoch was opened for it."""
        return self._progress.reopened > 0 or self._progress.is_stalled(now_s, round_s)

    async def look(self, alive: Sequence[KnownPeer], now_s: float, round_s: float) -> None:
        """Open an epoch if one is due; `round_s` is the length of a round."""
        head = self._replica.head
        if not self._is_open:
            if len(electable(alive, epoch=None)) >= self._min_peers:
                await self.open(alive, now_s)
        elif not electable(alive, epoch=head.epoch):  # nobody to open an epoch with
            self._progress.pause(now_s)
        # If the electors that have not resigned are no quorum, nothing can be decided at our head,
        # and no peer is beyond it. An epoch that opens there voids nothing, so it need not wait.
        elif not can_decide(self._replica.electorate, self._retired, (head.epoch, head.position)):
            await self.open(alive, now_s, because=": electors left")
        elif self._progress.is_stalled(now_s, round_s):
            await self._open_if_whole(alive, now_s)

    async def open(self, alive: Sequence[KnownPeer], now_s: float, because: str = "") -> bool:
        """Open an epoch with the peers that can vote; return False if there are none."""
        again = self._is_open
        peers = electable(alive, epoch=self._replica.head.epoch if again else None)
        if not peers:
            return False
        electors = choose_electors(
            [Elector(peer_id=p.peer_id, incarnation=p.incarnation) for p in peers]
        )
        self._retired.clear()  # peers that resigned are not electors of the new epoch
        opened = await self._replica.open_epoch(electors, self._sign)
        self._progress.restart(now_s, again=again and not because)
        text = f"epoch {opened.epoch} opened at position {opened.base_position}"
        plural = "" if len(electors) == 1 else "s"
        self._report("info", f"{text} with {len(electors)} peer{plural}{because}")
        return True

    async def _open_if_whole(self, alive: Sequence[KnownPeer], now_s: float) -> None:
        """Open an epoch unless half of the trainers hold entries that are missing here.

        An epoch at our head would void those entries, and no peer could return to that state: peers
        do not keep states that old.
        """
        head = self._replica.head
        ahead = common_position(alive, epoch=head.epoch) - head.position
        if ahead <= 0:
            await self.open(alive, now_s)
        elif not self._behind_reported:
            text = f"{ahead} rounds are missing here; a new epoch opens once they are fetched"
            self._report("warning", f"no progress, but {text}")
        self._behind_reported = ahead > 0
