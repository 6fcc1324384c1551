"""The order in which a peer's passes leave: what goes back before what goes on, the oldest first.

All sends share one uplink. If they all began at once, each would take as long as all together, and
the answers to headers would wait behind megabytes in the kernel: of 7 to 17 sends at a time at 10
Mbit/s, each waited 1.3 to 2.2 s for its answer, and meanwhile links were idle for a fifth of the
time. So only few begin: one is sent, and those behind it are asked for meanwhile, as an answer
takes a round trip. Returns and outputs have places of their own, and a return never waits for an
output.
"""

from __future__ import annotations

from collections import deque

from atoll.peer.pipeline.actions import SendPass

AHEAD_BYTES = 1 << 20  # begun at a time: 33 Mbit/s each way even if an answer takes 250 ms
LEAST_BEGUN = 2  # however large they are: one is sent, one is asked for


class _Lane:
    """The sends of one direction."""

    def __init__(self) -> None:
        self.waiting: deque[SendPass] = deque()
        self.begun: dict[int, int] = {}
        """bytes by the number of the send"""

    @property
    def has_room(self) -> bool:
        return len(self.begun) < LEAST_BEGUN or sum(self.begun.values()) < AHEAD_BYTES


class SendQueue:
    """The sends that wait for their turn, and those that have begun."""

    def __init__(self) -> None:
        """Begin empty."""
        self._returns, self._outputs = _Lane(), _Lane()

    def put(self, send: SendPass) -> None:
        """Let a send wait for its turn."""
        self._lane(send).waiting.append(send)

    def take(self) -> SendPass | None:
        """Return the next send that may begin; None if none may."""
        for lane in (self._returns, self._outputs):
            if lane.waiting and lane.has_room:
                send = lane.waiting.popleft()
                lane.begun[send.number] = send.payload.num_bytes
                return send
        return None

    def end(self, send: SendPass) -> None:
        """Note that a send needs the uplink no more."""
        self._lane(send).begun.pop(send.number, None)

    def _lane(self, send: SendPass) -> _Lane:
        return self._returns if send.header.is_return else self._outputs


class FairTurns:
    """Ranks of pieces, so that all peers which are sent something get equal shares of the uplink.

    A connection alone does not fill a link that it usually shares: its congestion window has become
    as small as its share. So pieces for different peers alternate (start-time fair queueing).
    """

    def __init__(self) -> None:
        """Begin with nothing sent."""
        self._now = 0
        self._ends: dict[str, int] = {}
        """in bytes, of what each peer was given"""

    def rank(self, peer: str, num_bytes: int) -> int:
        """Return the rank of a peer's next piece; the smallest one leaves first."""
        start = max(self._now, self._ends.get(peer, 0))
        self._ends[peer] = start + num_bytes
        return start

    def left(self, rank: int) -> None:
        """Note that a piece has left: peers that had nothing to send do not make up for it."""
        self._now = max(self._now, rank)
        self._ends = {peer: end for peer, end in self._ends.items() if end > self._now}
