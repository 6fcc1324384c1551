"""Who is in touch with the coordinator, and what follows from it: pure policies over one view.

Times are seconds of any steady clock that the caller passes in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.coordinator.rpc.messages import ALIVE_S
from atoll.coordinator.run.status import PeerStatus
from atoll.optim.log.entry import Elector, is_quorum

STALL_S = 60.0  # docs/protocol.md, part 1: without progress for this long, a new epoch
MAX_STALL_S = 3600.0  # new epochs that do not help come ever more slowly, up to this
PUBLISH_S = 15.0  # a peer that was asked for entries and sent none this long is passed over
FORGET_S = 3600.0  # gone peers stay in view this long
MAX_MEMBERS = 4096
PACE_BURST = 50.0  # reports at once; a link that was away delivers what it kept, 32 a report
PACE_PER_S = 10.0
SHUN_S = 300.0  # a peer that claimed to have entries and sent none is asked again after this

_ELECTABLE = ("ready", "training", "syncing")

MAX_INCARNATION_CHARS = 32  # of an elector's

Retired = dict[tuple[str, str], tuple[int, int]]
"""(peer id, incarnation) of who left: from which (epoch, position) on it has voted for nothing."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A peer as it said it is, and when."""

    status: PeerStatus
    seen_s: float
    left: bool = False

    def is_alive(self, now_s: float) -> bool:
        """Whether it was in touch lately and did not say goodbye."""
        return not self.left and now_s - self.seen_s <= ALIVE_S

    def shown(self, now_s: float) -> PeerStatus:
        """The status for people to see: with its age, and gone if it is."""
        age_s = max(0.0, now_s - self.seen_s)
        if self.is_alive(now_s):
            return dataclasses.replace(self.status, last_seen_s=age_s)
        return dataclasses.replace(
            self.status, last_seen_s=age_s, state="gone", phase="", tokens_per_s=0.0
        )


class Members:
    """The members of a run by peer id."""

    def __init__(self) -> None:
        """Nobody yet."""
        self._members: dict[str, Member] = {}

    def __len__(self) -> int:
        """How many are known, gone ones too."""
        return len(self._members)

    def get(self, peer_id: str) -> Member | None:
        """What is known of a peer."""
        return self._members.get(peer_id)

    def update(self, status: PeerStatus, now_s: float, *, left: bool = False) -> Member | None:
        """Take a status; returns what was known before."""
        before = self._members.get(status.peer_id)
        if before is None and len(self._members) >= MAX_MEMBERS:
            self._forget_oldest()
        self._members[status.peer_id] = Member(status=status, seen_s=now_s, left=left)
        return before

    def alive(self, now_s: float) -> list[Member]:
        """Those in touch, in order of peer id."""
        members = sorted(self._members.items())
        return [member for _, member in members if member.is_alive(now_s)]

    def all(self) -> list[Member]:
        """All that are known, in order of peer id."""
        return [member for _, member in sorted(self._members.items())]

    def forget(self, now_s: float) -> None:
        """Drop those that have been gone for long."""
        for peer_id, member in list(self._members.items()):
            if now_s - member.seen_s > FORGET_S:
                del self._members[peer_id]

    def _forget_oldest(self) -> None:
        oldest = min(self._members, key=lambda peer_id: self._members[peer_id].seen_s)
        del self._members[oldest]


def electable(alive: Iterable[Member], *, epoch: int | None) -> list[PeerStatus]:
    """The peers that may vote in a new epoch: trainers that hold a state.

    Before the first epoch (None) only those that said they are ready.
    """
    states = ("ready",) if epoch is None else _ELECTABLE
    return [
        member.status
        for member in alive
        if member.status.role == "trainer"
        and member.status.state in states
        and 0 < len(member.status.incarnation) <= MAX_INCARNATION_CHARS
    ]


def can_decide(
    electorate: Sequence[Elector],
    retired: Mapping[tuple[str, str], tuple[int, int]],
    at: tuple[int, int],
) -> bool:
    """Whether anything may have been decided at (epoch, position), or still may.

    Not if those who have voted for nothing there, and never will, leave no quorum.  True where the
    electorate is not known.
    """
    since = [retired.get((e.peer_id, e.incarnation)) for e in electorate]
    voters = [i for i, place in enumerate(since) if place is None or place > at]
    return not electorate or is_quorum(voters, len(electorate))


@dataclass
class Progress:
    """Watches a run for standing still."""

    position: int = -1
    since_s: float = 0.0
    reopened: int = 0
    """New epochs since the last progress."""

    def note(self, position: int, now_s: float) -> None:
        """Take the furthest position that anyone has."""
        if position > self.position:
            self.position, self.since_s, self.reopened = position, now_s, 0

    def restart(self, now_s: float, *, again: bool) -> None:
        """Count anew after an epoch was opened, `again` if it is not the first."""
        self.since_s = now_s
        self.reopened += again

    def pause(self, now_s: float) -> None:
        """Do not count the time in which nobody is there who could make progress."""
        self.since_s = now_s

    def is_stalled(self, now_s: float, round_s: float) -> bool:
        """Whether a new epoch is due; `round_s` is what a round takes, 0 if unknown."""
        patience_s = max(STALL_S, 3 * round_s) * 2.0 ** min(self.reopened, 10)
        return now_s - self.since_s > min(patience_s, max(MAX_STALL_S, 3 * round_s))


def window_s(alive: Iterable[Member], *, tokens: int) -> float:
    """Median seconds of a window, as the trainers tell their speed; 0 where none does.

    Args:
        alive: who is in touch.
        tokens: of a window.
    """
    speeds = (m.status.tokens_per_s for m in alive if m.status.role == "trainer")
    times = sorted(tokens / speed for speed in speeds if speed > 0)
    return times[(len(times) - 1) // 2] if times else 0.0


@dataclass
class Pace:
    """How often one peer may report: a bucket that refills."""

    left: float = PACE_BURST
    at_s: float = 0.0

    def take(self, now_s: float) -> bool:
        """Whether one more report is within the pace."""
        self.left = min(PACE_BURST, self.left + (now_s - self.at_s) * PACE_PER_S)
        self.at_s = now_s
        if self.left < 1:
            return False
        self.left -= 1
        return True


def common_position(alive: Sequence[Member], *, epoch: int) -> int:
    """The position that at least half of the live trainers have reached; one liar moves nothing."""
    reported = sorted(
        m.status.position if m.status.epoch == epoch else 0
        for m in alive
        if m.status.role == "trainer"
    )
    return reported[(len(reported) - 1) // 2] if reported else 0


@dataclass
class Publisher:
    """Chooses the one peer that sends the coordinator what it lacks."""

    peer_id: str = ""
    position: int = -1
    since_s: float = 0.0
    shunned: dict[str, float] = field(default_factory=dict)
    """Until when each peer is not asked."""

    def asked(
        self, peer_id: str, alive: Sequence[Member], *, epoch: int, position: int, now_s: float
    ) -> bool:
        """Whether `peer_id` is the one to send the entries from `position` on."""
        ahead = [
            m.status.peer_id
            for m in alive
            if m.status.epoch == epoch
            and m.status.position > position
            and self.shunned.get(m.status.peer_id, now_s) <= now_s
        ]
        if peer_id not in ahead:
            return False
        if now_s - self.since_s > PUBLISH_S and position == self.position:
            ahead = self._shun(ahead, now_s)
        if self.peer_id not in ahead:
            self._choose(ahead[position % len(ahead)], position, now_s)
        if position != self.position:
            self._choose(self.peer_id, position, now_s)
        return peer_id == self.peer_id

    def _shun(self, ahead: list[str], now_s: float) -> list[str]:
        others = [peer_id for peer_id in ahead if peer_id != self.peer_id]
        self.shunned = {p: until_s for p, until_s in self.shunned.items() if until_s > now_s}
        if others:
            self.shunned[self.peer_id] = now_s + SHUN_S
        return others or ahead

    def _choose(self, peer_id: str, position: int, now_s: float) -> None:
        self.peer_id, self.position, self.since_s = peer_id, position, now_s
