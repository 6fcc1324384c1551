"""A peer's account of one round: how long each phase took, and who was left out and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from atoll.optim.log.live import Applied
from atoll.peer.rounds.allreduce.exchange import Exchange


@dataclass(kw_only=True)
class RoundTrace:
    """The times of one position, as this peer saw them, in seconds."""

    position: int
    wait_s: float = 0.0
    send_s: float = 0.0
    reduce_s: float = 0.0
    vote_s: float = 0.0
    apply_s: float = 0.0
    rejected: float = 0.0
    """L2 norm of what a robust rule took out of the parts that this peer reduced"""
    left_out: dict[str, str] = field(default_factory=dict)
    """PeerIDs that this peer went on without, and why: as an owner of parts, and as the leader"""


def round_trace(
    applied: Applied,
    exchange: Exchange | None,
    *,
    since: float,
    turn_at: float | None,
    now: float,
) -> RoundTrace:
    """The account of a peer whose contribution was on offer.

    Args:
        applied: the decided position.
        exchange: this peer's part in the reduction, None where it came to none.
        since: when the contribution was offered.
        turn_at: when its position came to be decided, None where this peer has not seen that; what
            was reduced before waits until then.
        now: when the position was decided and applied.
    """
    trace = RoundTrace(position=applied.entry.position, apply_s=applied.apply_s)
    if exchange is None:
        trace.wait_s = now - since
        return trace
    times = exchange.times
    sent = times.sent if times.sent is not None else now
    reduced = times.reduced if times.reduced is not None else now
    turn_at = max(reduced, reduced if turn_at is None else turn_at)
    trace.wait_s = times.started - since + turn_at - reduced
    trace.send_s = sent - times.started
    trace.reduce_s = max(0.0, reduced - sent)
    trace.vote_s = max(0.0, now - applied.apply_s - turn_at)
    trace.rejected = math.hypot(*exchange.rejected.values())
    members = exchange.group.members
    trace.left_out = {members[index].peer_id: why for index, why in exchange.left_out.items()}
    return trace
