"""Policies of gossip: which peers meet and which invitations are refused, as pure functions.

Without a log, a round is a peer's own count of outer steps. At the end of a window, a peer that is
behind adopts the count of the peers ahead, so that all draw pairs for the same round. The count
belongs to the run; it does not measure a peer's work.

A ready peer waits a grace period for its partner. Peers of equal speed whose windows end further
apart, such as a joiner and the others, would never meet. A peer that met no partner in its last
rounds therefore waits longer, up to a whole window, and is in step with the others from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from atoll.dht.refusals import RefusalCode
from atoll.optim.inprocess.gossip import pairs

REFUSALS = frozenset(
    {
        RefusalCode.AHEAD,
        RefusalCode.TRAINING,
        RefusalCode.ELSEWHERE,
        RefusalCode.PAIRED,
        RefusalCode.BARRED,
        RefusalCode.REPLAYED,
        RefusalCode.NOT_BEGUN,
    }
)
"""Codes with which an invited peer declines; declining is not a fault."""

# Rounds behind at which a peer catches up. A peer only one round behind may still meet its partner;
# if it caught up, it would wait a window for a partner that has just begun one.
LATE_BY = 2
HUNGRY_ROUNDS = 2  # rounds in a row without a ready partner, after which it waits a whole window


class Verdict(Enum):
    """Decision of an invited peer that does not refuse."""

    ACCEPT = "accept"
    WAIT = "wait"


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One peer's part in a round."""

    partner: str | None
    """Partner; None for the odd one out."""
    invites: bool = False
    """True if it invites its partner instead of waiting for an invitation."""


@dataclass(frozen=True, kw_only=True)
class Invited:
    """View on which an invited peer decides."""

    remote: str
    their_round: int
    own_round: int
    partner: str | None
    """Partner by this peer's own draw for its round."""
    meeting: str | None
    """Partner of a meeting in progress."""
    has_window: bool
    """True if its window is complete and on offer."""
    is_open: bool
    """True if it waits for an invitation."""
    ready_in_s: float | None
    """Seconds until its window is complete; None if it does not train."""
    left_s: float
    """Seconds that the inviting peer still waits."""


def brought_level(own: int, others: Iterable[int], *, by: int = LATE_BY) -> int:
    """Return the round in which a peer continues.

    This is the highest round that two others have reached (or the only other one), if that is at
    least `by` rounds ahead. A single liar cannot move a peer that knows two others.

    Args:
        own: round of this peer.
        others: rounds of the other peers.
        by: least lead of the others for which this peer moves.
    """
    reached = sorted(others, reverse=True)
    level = reached[min(1, len(reached) - 1)] if reached else own
    return level if level >= own + by else own


def patience_s(grace_s: float, window_s: float, hungry: int) -> float:
    """Return the seconds for which a peer waits for its partner to be ready.

    Args:
        grace_s: grace period of the run.
        window_s: seconds that this peer's last window took.
        hungry: rounds in a row in which its partner was not ready in time.
    """
    return max(grace_s, window_s * min(1.0, hungry / HUNGRY_ROUNDS))


def draw(me: str, others: Collection[str], *, run_id: bytes, position: int) -> Draw:
    """Draw this peer's partner in a round.

    Peers that know the same live trainers draw the same pairs. If their views differ, the invited
    peer refuses.

    Args:
        me: PeerID of this peer.
        others: PeerIDs of the run's other live trainers.
        run_id: id of the run.
        position: the round.
    """
    for pair in pairs(sorted({me, *others}), run_id.hex(), position):
        if me in pair:
            other = next((peer for peer in pair if peer != me), None)
            return Draw(partner=other, invites=pair[0] == me)
    raise AssertionError("everyone is in a pair or alone")


def answer(view: Invited) -> Verdict | RefusalCode:
    """Decide on an invitation; WAIT while this peer may still become ready."""
    if view.own_round > view.their_round:
        return RefusalCode.AHEAD
    if view.own_round == view.their_round and view.has_window:
        if view.meeting is not None:
            return RefusalCode.PAIRED
        if view.partner != view.remote:
            return RefusalCode.ELSEWHERE
        return Verdict.ACCEPT if view.is_open else Verdict.WAIT
    is_late = view.ready_in_s is None or view.ready_in_s > view.left_s
    return RefusalCode.TRAINING if is_late and not view.has_window else Verdict.WAIT
