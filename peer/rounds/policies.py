"""The decisions of a round, as pure functions of a view.  Nothing here waits or sends.

The weight rule, the weight cap and the clip factors are the optimizer's (``atoll.optim.weights``);
who leads, who votes and what a quorum is belong to the log (``atoll.optim.log``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from atoll.peer.rounds.messages import PartPlan

MAX_MBIT_S = 1e5  # a claim beyond 100 Gbit/s is cut to it


class Close(Enum):
    """What to do with a group that is forming."""

    WAIT = "wait"
    CLOSE = "close"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """A leader's view of a forming group.  Times are seconds on one clock."""

    ready: Collection[str]
    """peers that reported ready"""
    expected: Mapping[str, float]
    """peers that are alive at this position, and when each expects to be ready (absolute)"""
    electors_ready: int
    electors: int
    first_ready_at: float
    quorum_ready_at: float | None
    """when a quorum of the electors was ready, None while it is not"""
    grace_s: float
    alone_s: float
    """after this long without a quorum of electors the group closes with who is there"""


def close_decision(view: Rendezvous, now: float) -> Close:
    """Close as soon as all whom we expect are there, or an adaptive grace is over.

    The grace runs from the moment at which a quorum of electors is ready, and covers only peers
    that expect to be ready within it: a straggler loses nothing (its progress stays in its drift),
    so nobody waits for one that says it will be late.
    """
    if not view.ready:
        return Close.WAIT
    missing = [at for peer, at in view.expected.items() if peer not in view.ready]
    if not missing:
        return Close.CLOSE
    if view.quorum_ready_at is None:
        return Close.CLOSE if now >= view.first_ready_at + view.alone_s else Close.WAIT
    limit = view.quorum_ready_at + view.grace_s
    worth_waiting = any(at <= limit for at in missing)
    return Close.WAIT if now < limit and worth_waiting else Close.CLOSE


def split_cells(num_cells: int, uplink_mbit_s: Sequence[float]) -> list[PartPlan]:
    """Cut the cells into one part an owner, in proportion to the owners' uplinks.

    Largest remainders decide the odd cells; an owner whose share rounds to nothing gets no part.
    """
    rates = [min(max(rate, 1e-3), MAX_MBIT_S) for rate in uplink_mbit_s]
    ideal = [num_cells * rate / sum(rates) for rate in rates]
    shares = [int(share) for share in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda i: (shares[i] - ideal[i], i))
    for index in by_remainder[: num_cells - sum(shares)]:
        shares[index] += 1
    plans: list[PartPlan] = []
    start = 0
    for owner, share in enumerate(shares):
        if share:
            plans.append(PartPlan(start_cell=start, stop_cell=start + share, owner=owner))
            start += share
    return plans


def round_deadline_s(body_bytes: int, slowest_mbit_s: float, stall_s: float) -> float:
    """How long a reduction may take: eight times the slowest member's transfer, and ten stalls.

    Both legs of the slowest link carry at most the whole vector; eight leaves room for a
    measured rate that is four times too high.
    """
    transfer_s = 8 * body_bytes / (max(slowest_mbit_s, 0.1) * 1e6)
    return 8 * transfer_s + 10 * stall_s


def new_owner(dead: Collection[int], alive: Sequence[int], load: Mapping[int, int]) -> int | None:
    """The survivor that owns the fewest cells, the first of equals; None when nobody is left."""
    candidates = [index for index in alive if index not in dead]
    return min(candidates, key=lambda i: (load.get(i, 0), i), default=None)
