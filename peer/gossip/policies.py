"""Who meets whom, and who is told no: pure functions of what one peer knows.

Without a log a **round** is a peer's own count of outer steps.  At the end of a window a peer that
is behind takes over the count of those that are further, so that pairs are drawn for the same
round: a count is the run's, not a measure of the peer's work.

Who is ready waits for its partner for a grace.  Windows of two that never overlap by so much, as
those of a joiner and of the others, would never meet: who met nobody in its last rounds waits
longer, for a window at most, and is in step with the others from then on.
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
"""Codes by which an invited peer declines; declining is no fault."""

LATE_BY = 2  # rounds; one behind is late, and its partner may still be waiting
HUNGRY_ROUNDS = 2  # in a row without a partner that was ready, until a whole window is waited for


class Verdict(Enum):
    """What an invited peer does, unless it refuses."""

    ACCEPT = "accept"
    WAIT = "wait"


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One peer's part in a round."""

    partner: str | None
    """whom it meets; None for the odd one out"""
    invites: bool = False
    """whether it asks, or waits to be asked"""


@dataclass(frozen=True, kw_only=True)
class Invited:
    """What an invited peer looks at before it answers."""

    remote: str
    their_round: int
    own_round: int
    partner: str | None
    """whom this peer's own draw of its round names"""
    meeting: str | None
    """whom it is meeting now"""
    has_window: bool
    """whether its window is done and on offer"""
    is_open: bool
    """whether it waits to be asked"""
    ready_in_s: float | None
    """until it is; None where nothing will come"""
    left_s: float
    """how long the other one may be kept waiting"""


def brought_level(own: int, others: Iterable[int], *, by: int = LATE_BY) -> int:
    """The round that a peer goes on with.

    It is the furthest that two others have reached (the only other one, where there is one), if
    that is at least `by` beyond its own: so one liar moves nobody who knows two.
    """
    reached = sorted(others, reverse=True)
    level = reached[min(1, len(reached) - 1)] if reached else own
    return level if level >= own + by else own


def patience_s(grace_s: float, window_s: float, hungry: int) -> float:
    """How long a peer waits for its partner to be ready.

    Args:
        grace_s: of the run.
        window_s: what this peer's last window took.
        hungry: rounds in a row in which its partner was not ready in time.
    """
    return max(grace_s, window_s * min(1.0, hungry / HUNGRY_ROUNDS))


def draw(me: str, others: Collection[str], *, run_id: bytes, position: int) -> Draw:
    """This peer's partner in a round.

    All who know the same live trainers draw the same pairs; where views differ, who is asked says
    no.

    Args:
        me: this peer.
        others: live trainers of the run.
        run_id: of the run.
        position: the round.
    """
    for pair in pairs(sorted({me, *others}), run_id.hex(), position):
        if me in pair:
            other = next((peer for peer in pair if peer != me), None)
            return Draw(partner=other, invites=pair[0] == me)
    raise AssertionError("everyone is in a pair or alone")


def answer(view: Invited) -> Verdict | RefusalCode:
    """Decide on an invitation; WAIT while this peer may still become able to meet."""
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
