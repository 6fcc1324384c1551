"""Parts of a process that tell the audit of its run what they do; they do it as always.

Each takes the place of its class while a simulation runs (`world.World.places`). What a process
that has been killed still does, nobody hears of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.optim.inprocess.gossip import Met
from atoll.optim.log.live_replica import Applied, LiveReplica
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon.keeping import KeptBallots
from atoll.peer.gossip.invitations import Invitee
from atoll.peer.gossip.meeting import Meeting
from atoll.peer.gossip.peer import GossipPeer
from atoll.peer.lab.hunt.edges import Machine, here, living
from atoll.peer.lab.hunt.mass_audits import Process
from atoll.peer.rounds.consensus.ballots import Ballots, Place


class WatchedReplica(LiveReplica):
    """A replica whose entries the world's audit sees."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments, **options)
        self.listeners.append(self._watch)

    @staticmethod
    def _watch(applied: Applied) -> None:
        machine = living()
        if machine is not None:
            machine.world.audit.applied(machine, applied)


class WatchedBallots(Ballots):
    """A keeper's memory, which the world's audit compares with where it has voted."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments, **options)
        here().world.audit.remembered(here(), self._incarnation, self.left)

    @property
    def _incarnation(self) -> str:
        kept: KeptBallots = self.keep.__self__  # type: ignore[attr-defined]
        return kept.incarnation

    def note(self, place: Place) -> None:
        """Store a place, and see that it was stored."""
        super().note(place)
        machine = living()
        if machine is not None:
            machine.world.audit.promised(self._incarnation, place)


class WatchedGossipPeer(GossipPeer):
    """A peer's state in a run by gossip, whose mass the world's audit follows."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments, **options)
        machine = living()
        if machine is not None:
            machine.world.audit.mass.begun(process_of(machine), self.state, self.mass)

    def move(self, state: OuterState, mass: float) -> None:
        """Replace the state and its mass, and tell both."""
        before = self.state, self.mass
        super().move(state, mass)
        machine = living()
        if machine is not None:
            window = self.round.window if self.round is not None else None
            after = self.state, self.mass
            machine.world.audit.mass.moved(process_of(machine), before, after, window)


class WatchedMeeting(Meeting):
    """A meeting whose result the world's audit knows, and whose commit the world's faults see."""

    async def trade(self) -> Met:
        """Send and receive all vectors, and tell what comes of it."""
        met = await super().trade()
        machine = living()
        if machine is not None:
            audit = machine.world.audit.mass
            audit.offered(process_of(machine), self._exchange, self._mine, met.state)
        return met

    async def decide(self, commit: Callable[[], None]) -> None:
        """Commit, and let that moment be struck before the other side knows."""

        def commit_and_tell() -> None:
            commit()
            machine = living()
            if machine is not None:
                machine.world.faults.committed(machine, self._stream.remote)

        await super().decide(commit_and_tell)


class WatchedInvitee(Invitee):
    """The invited side, which tells when it gives up."""

    def _give_up(self, partner: str) -> None:
        super()._give_up(partner)
        machine = living()
        if machine is not None:
            peer = self._peer
            machine.world.audit.mass.gave_up(process_of(machine), peer.state, peer.mass)


def process_of(machine: Machine) -> Process:
    """Return which process of a machine runs now."""
    return machine.name, machine.num_starts
