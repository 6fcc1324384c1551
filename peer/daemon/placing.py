"""One peer's part in placement: what it announces of its place, and when it moves to another stage.

Every peer of a pipeline looks at the same announcements and computes the same decision
(`atoll.peer.pipeline.placement`); the one that is named moves. It announces where it goes, drains,
leaves the log of its stage as a peer leaves a run, and joins that of the other one.

If it cannot serve that one, it returns. For a while it then announces less memory than that stage
needs, since all decide by what is announced: else it would be named again, and the others wait.

A vacant stage is looked for all the time, a better balance every `rebalance_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress

from atoll.dht.roster import PeerRecord, StagePlace
from atoll.optim.log.entry import Elector
from atoll.peer.daemon.options import StageMove
from atoll.peer.pipeline.placement import (
    PEER_COOLDOWN_S,
    STAGE_COOLDOWN_S,
    Confirmed,
    Duty,
    Move,
    PlacementView,
    PlaceRecord,
    StageNeeds,
    decide,
    next_look_s,
)

VACANT_LOOK_S = 2.0  # between two looks for a vacant stage; a record is renewed each 5 s


class Placing:
    """Decides whether this peer moves. Times are of one steady clock of this machine."""

    def __init__(
        self,
        modules: Sequence[str],
        me: Elector,
        module: str,
        *,
        rebalance_s: float,
        moved: StageMove | None = None,
    ) -> None:
        """Begin at a module.

        Args:
            modules: of the run.
            me: this peer in this process.
            module: that it serves.
            rebalance_s: between two looks for a better balance; 0: it only fills vacant stages.
            moved: how it came there, if it came from another one.
        """
        self._modules, self._me, self._module = list(modules), me, module
        self._rebalance_s = rebalance_s
        self._moved = moved
        self._arrived_s = -math.inf if moved is None else math.inf
        self._confirmed = Confirmed(rebalance_s or math.inf)
        self._next_look_s = -math.inf
        self.leaves_for: str | None = None
        """The module that this peer is about to move to."""
        self.fills_vacant = False
        """Whether that module has no peer, so that nothing gets through the run meanwhile."""

    def place(
        self,
        *,
        is_serving: bool,
        tokens_per_s: float,
        download_mbit_s: float,
        device_bytes: int,
        needs: Sequence[StageNeeds] = (),
        now_s: float,
    ) -> tuple[str, StagePlace]:
        """Return the module and the place that this peer announces.

        Args:
            is_serving: whether it takes part in its stage; else it still fetches what that needs.
            tokens_per_s: that it can do in its stage; 0 before it was measured.
            download_mbit_s: measured; 0 if unknown.
            device_bytes: memory in which it holds a stage.
            needs: of the run's stages, once they are known.
            now_s: the time.
        """
        if is_serving:
            self._arrived_s = min(self._arrived_s, now_s)
        here_s = now_s - self._arrived_s  # less than 0 on its way
        came_from = ""
        if self.leaves_for is not None:
            came_from = self._module
        elif self._moved is not None and here_s < STAGE_COOLDOWN_S:
            came_from = self._moved.came_from
        stays = self.leaves_for is None
        if needs and self._moved is not None and self._moved.has_failed:
            failed = needs[self._modules.index(self._moved.came_from)]
            if here_s < PEER_COOLDOWN_S:
                device_bytes = min(device_bytes, failed.device_bytes - 1)
        return self.leaves_for or self._module, StagePlace(
            duty="serving" if stays and is_serving else "moving",
            tokens_per_s=tokens_per_s,
            download_mbit_s=download_mbit_s,
            device_bytes=device_bytes,
            came_from=came_from,
            is_rested=stays and here_s >= PEER_COOLDOWN_S,
        )

    def look(
        self, needs: Sequence[StageNeeds], records: Iterable[PeerRecord], now_s: float
    ) -> str | None:
        """Return the module that this peer moves to now; None if it stays.

        Args:
            needs: of the run's stages.
            records: of all peers, this one included.
            now_s: the time.
        """
        view = PlacementView(stages=tuple(needs), peers=tuple(self._seen(records)))
        move = decide(view, self._confirmed.passed_over)
        if move is not None and not move.fills and not self._may_balance(now_s):
            return None
        made = self._confirmed.look(move, now_s)
        if move is None or not move.fills:
            self._plan_look(view, move, now_s)
        if made is None or (made.peer_id, made.incarnation) != self._name:
            return None
        self.leaves_for, self.fills_vacant = self._modules[made.target], made.fills
        return self.leaves_for

    @property
    def _name(self) -> tuple[str, str]:
        return self._me.peer_id, self._me.incarnation

    def _may_balance(self, now_s: float) -> bool:
        return bool(self._rebalance_s) and now_s >= self._next_look_s

    def _plan_look(self, view: PlacementView, move: Move | None, now_s: float) -> None:
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + next_look_s(view, move, self._rebalance_s or math.inf)

    def _seen(self, records: Iterable[PeerRecord]) -> Iterable[PlaceRecord]:
        for record in records:
            if record.role != "trainer" or record.module not in self._modules:
                continue
            place = record.place or StagePlace()
            came_from = place.came_from
            with suppress(ValueError):  # numbers that no honest peer announces
                yield PlaceRecord(
                    peer_id=record.peer_id,
                    incarnation=record.incarnation,
                    stage=self._modules.index(record.module),
                    duty=Duty(place.duty),
                    samples_per_s=place.tokens_per_s or None,
                    download_mbit_s=place.download_mbit_s,
                    device_bytes=place.device_bytes,
                    came_from=self._modules.index(came_from)
                    if came_from in self._modules
                    else None,
                    is_rested=place.is_rested,
                )
