"""Heads: the places in the log at which peers stand, by their own answers to a call.

A heartbeat needs an invite and a key. An answer to a `head` call also needs a node that speaks the
run's protocol under that PeerID and holds a log, so epochs are opened with answers.

How peers are reached is not decided here: the run's first DHT node brings an `AskHeads`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

FRESH_S = 5.0  # an answer counts this long: a peer that waits for an epoch does not move
AGAIN_S = 5.0  # a silent peer is not called sooner: redialling it would fail as well
ASKED_AT_ONCE = 64  # as many as an epoch has electors
PATIENCE_S = 8.0  # a dial across the world and back; the coordinator's clock waits meanwhile


@dataclass(frozen=True, kw_only=True)
class PeerHead:
    """A peer's answer to a `head` call, under the PeerID that the transport authenticated."""

    peer_id: str
    incarnation: str
    epoch: int
    position: int
    chain: bytes
    epoch_record: bytes
    """The newest epoch that it holds, as signed; empty before the first."""


AskHeads = Callable[[Sequence[str]], Awaitable[Sequence[PeerHead]]]
"""Calls these PeerIDs at once; returns the answers of those that answer."""


@dataclass
class Heads:
    """Asks peers, and keeps their answers for a moment. Times are of any steady clock."""

    ask: AskHeads
    _answers: dict[str, tuple[PeerHead, float]] = field(default_factory=dict)
    _silent: dict[str, float] = field(default_factory=dict)

    async def of(self, peer_ids: Sequence[str], now_s: float) -> list[PeerHead]:
        """Return the fresh answers of these peers, in their order; call those that owe one."""
        self._answers = {p: a for p, a in self._answers.items() if now_s - a[1] <= FRESH_S}
        self._silent = {p: s for p, s in self._silent.items() if now_s - s <= AGAIN_S}
        due = [p for p in peer_ids if p not in self._answers and p not in self._silent]
        due = due[:ASKED_AT_ONCE]
        answered: Sequence[PeerHead] = ()
        if due:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    answered = await self.ask(due)
            except TimeoutError:
                answered = ()
        self._silent.update(dict.fromkeys(due, now_s))
        for head in answered:
            if head.peer_id in self._silent:
                del self._silent[head.peer_id]
                self._answers[head.peer_id] = (head, now_s)
        return [self._answers[p][0] for p in peer_ids if p in self._answers]
