"""The view of a leader's term, the events that it takes, and the actions that it asks for.

    LeaderView      the clock, the log and the parts in hand, as the leader sees them
    Event           an occurrence, for `Round.receive`
    Action          a thing to do, from `Round.receive` and `Round.advance`

All of it is plain data: `round.py` decides, and `leader.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice
from atoll.optim.log.entry import Certificate, Elector, Entry
from atoll.optim.log.locks import Justification, Lock, SignedPromise
from atoll.peer.rounds.consensus.ballots import Accepted
from atoll.peer.rounds.messages import Group, PartDone, Ready, Repair


@dataclass(frozen=True, kw_only=True)
class LeaderView:
    """A leader's view of clock, log and parts; times are seconds on one clock."""

    now: float
    turn: bool
    """whether the position is the one that is decided next"""
    electorate: tuple[Elector, ...]
    """of the position that is decided next"""
    opened_at: float
    """when that position came to be decided next"""
    last_s: float
    """how long the last position was next, of those decided by their first ballots"""
    promised_term: int = 0
    """the term below which the leader's own acceptor accepts nothing there"""
    held: frozenset[int] = frozenset()
    """parts whose named bytes are in hand"""
    coming: frozenset[int] = frozenset()
    """parts that the leader's own exchange may still bring"""
    control: Entry | None = None
    """the entry that brings an order, if one waits and this is the turn"""
    takes_updates: bool = True
    """whether an update may be decided there: the run is neither paused nor over"""
    evicted: frozenset[str] = frozenset()
    """peers that orders have put out: no entry may have them as members"""


# Events


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A member's session began with its report."""

    peer: str
    ready: Ready


@dataclass(frozen=True, kw_only=True)
class Left:
    """A member's session ended."""

    peer: str
    is_cut_off: bool = False
    """whether a relay was lost: the member may report again through another"""


@dataclass(frozen=True, kw_only=True)
class Unreachable:
    """A message to a member could not be sent; its session is about to end."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class Probed:
    """All who may come were asked: when each expects to be ready, on the leader's clock."""

    ready_at: Mapping[str, float]
    behind: frozenset[str] = frozenset()
    """those of them that lack several entries: only a group of one waits for them"""


@dataclass(frozen=True, kw_only=True)
class ElectorsProbed:
    """All electors without a session were asked where they stand, and the others about them."""

    silent: frozenset[str]
    """PeerIDs of those that do not answer, or far behind, or as another incarnation, by the word of
    a quorum"""


@dataclass(frozen=True, kw_only=True)
class LeaderAbsent:
    """The leader of the term before does not answer, or its time is over and an order waits."""


@dataclass(frozen=True, kw_only=True)
class PartReduced:
    """A member says that it has finished a part."""

    peer: str
    done: PartDone


@dataclass(frozen=True, kw_only=True)
class FetchEnded:
    """A fetch has ended, with the bytes in hand or without."""

    part: int
    digest: bytes


@dataclass(frozen=True, kw_only=True)
class Promised:
    """An elector promised an attempt; what it accepted before."""

    attempt: int
    elector: int
    accepted: Accepted | None
    signed: SignedPromise | None = None
    """checked, like the lock; only in a run that tolerates liars"""


@dataclass(frozen=True, kw_only=True)
class VoteArrived:
    """An elector voted for the entry of an attempt, with a signature that was checked."""

    attempt: int
    elector: int
    signature: bytes


@dataclass(frozen=True, kw_only=True)
class CommitArrived:
    """An elector committed the entry of an attempt, with a signature that was checked."""

    attempt: int
    elector: int
    signature: bytes


@dataclass(frozen=True, kw_only=True)
class Polled:
    """All electors have answered the question of an attempt, or will not."""

    attempt: int


Event = (
    Reported
    | Left
    | Unreachable
    | Probed
    | ElectorsProbed
    | LeaderAbsent
    | PartReduced
    | FetchEnded
    | Promised
    | VoteArrived
    | CommitArrived
    | Polled
)


# Actions


@dataclass(frozen=True, kw_only=True)
class AskPromises:
    """Ask all electors for promises."""

    attempt: int


@dataclass(frozen=True, kw_only=True)
class CloseGroup:
    """Bring a group to its members."""

    group: Group
    uplinks_mbit_s: Mapping[str, float]
    broke: frozenset[str] = frozenset()
    """peers that said that they would be ready by now, and have not reported"""


@dataclass(frozen=True, kw_only=True)
class TellGone:
    """Report to all members that one is gone, by its index."""

    member: int


@dataclass(frozen=True, kw_only=True)
class Readmit:
    """Bring the group to a member that has reported again, and what was ordered since."""

    peer: str
    orders: tuple[Repair, ...]
    gone: tuple[int, ...]
    """indices of members"""


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Get a part that is done and does not come by itself, from any of these members."""

    part: int
    done: PartDone
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RepairPart:
    """Order all members to reduce a part again under a new owner."""

    order: Repair
    owner: str
    overdue: str = ""
    """PeerID of the owner before, if it is there and did not finish the part in time"""


@dataclass(frozen=True, kw_only=True)
class SendProposal:
    """Ask all electors for votes."""

    attempt: int
    entry: Entry
    deadline_s: float | None
    """for each vote; None before there is a group"""
    is_own: bool
    """whether the entry is an update of this leader's group"""
    justification: Justification
    """empty unless the run tolerates liars"""


@dataclass(frozen=True, kw_only=True)
class SendLock:
    """Ask all electors for commits."""

    attempt: int
    entry: Entry
    lock: Lock


@dataclass(frozen=True, kw_only=True)
class StopPoll:
    """Wait for no more answers to the last question."""


@dataclass(frozen=True, kw_only=True)
class Decide:
    """The position is decided."""

    entry: Entry
    certificate: Certificate


@dataclass(frozen=True, kw_only=True)
class Fail:
    """The term ends without a decision."""

    why: str


@dataclass(frozen=True, kw_only=True)
class ReportArrived:
    """Report an event to the operator."""

    level: Level
    notice: Notice


Action = (
    AskPromises
    | CloseGroup
    | TellGone
    | Readmit
    | Fetch
    | RepairPart
    | SendProposal
    | SendLock
    | StopPoll
    | Decide
    | Fail
    | ReportArrived
)
