"""Heads: the places in the log at which peers stand, by their own answers to a call.

A heartbeat needs an invite and a key. An answer to a `head` call also needs a node that speaks the
run's protocol under that PeerID and holds a log, so epochs are opened with answers.

Each peer is called by itself, so one that never answers costs the others nothing but the wait. It
is called again after a pause that doubles, and half of the calls are kept for peers that answered
the last time: thousands of silent keys delay a peer's first answer, and none of the later ones.

How a peer is reached is not decided here: the run's first DHT node brings an `AskHead`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

PATIENCE_S = 8.0  # a dial across the world and back; the coordinator's tick does not wait for it
FRESH_S = 10.0  # an answer counts this long, so all of one look do: a peer that waits does not move
RENEW_S = FRESH_S - PATIENCE_S  # an older one would expire while others are called
AGAIN_S = 5.0  # a silent peer is not called sooner, then twice as long each time
MAX_AGAIN_S = 60.0  # so that a peer that was mended is asked within the minute
CALLED_AT_ONCE = 64  # as many as an epoch has electors
FOR_KNOWN = CALLED_AT_ONCE // 2  # of these, for peers that answered the last time
FORGET_S = 600.0

log = logging.getLogger(__name__)


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


AskHead = Callable[[str], Awaitable[PeerHead | None]]
"""Calls a PeerID; returns its answer, None without one."""


@dataclass
class _Called:
    """Outcome of the last call to a peer."""

    at_s: float
    """when it ended"""
    silent: int
    """calls in a row without an answer"""
    answer: PeerHead | None

    def is_due(self, now_s: float) -> bool:
        pause_s = min(AGAIN_S * 2.0 ** min(self.silent - 1, 10), MAX_AGAIN_S)
        return now_s - self.at_s > (pause_s if self.answer is None else RENEW_S)


@dataclass
class Heads:
    """Asks peers, and keeps their answers for a moment. Times are of any steady clock."""

    ask: AskHead
    _called: dict[str, _Called] = field(default_factory=dict)
    _waiting: dict[str, None] = field(default_factory=dict)
    """peers that were never called, those first that wait longest"""

    async def of(self, peer_ids: Sequence[str], now_s: float) -> list[PeerHead]:
        """Return the fresh answers of these peers, in their order; call those that owe one."""
        self._called = {p: c for p, c in self._called.items() if now_s - c.at_s <= FORGET_S}
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as calls:
            for peer_id in self._due(peer_ids, now_s):
                calls.create_task(self._call(peer_id, lambda: now_s + loop.time() - began_s))
        now_s += loop.time() - began_s
        found = [self._called[p] for p in peer_ids if p in self._called]
        return [c.answer for c in found if c.answer and now_s - c.at_s <= FRESH_S]

    def _due(self, peer_ids: Sequence[str], now_s: float) -> list[str]:
        wanted = set(peer_ids)
        self._waiting = {p: None for p in self._waiting if p in wanted}
        self._waiting.update(dict.fromkeys(p for p in peer_ids if p not in self._called))
        again = sorted(
            (p for p in peer_ids if p in self._called and self._called[p].is_due(now_s)),
            key=lambda p: self._called[p].at_s,
        )
        known = [p for p in again if self._called[p].answer is not None]
        first = known[:FOR_KNOWN]
        others = [*self._waiting, *(p for p in again if p not in first)]
        return [*first, *others[: CALLED_AT_ONCE - len(first)]]

    async def _call(self, peer_id: str, now: Callable[[], float]) -> None:
        before = self._called.get(peer_id)
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await self.ask(peer_id)
        except TimeoutError:
            answer = None
        except Exception:  # one peer's answer must not cost those of the others
            log.exception("the answer of %s cannot be read", peer_id)
            answer = None
        if answer is not None and answer.peer_id != peer_id:
            answer = None
        silent = 0 if answer is not None else 1 + (before.silent if before is not None else 0)
        self._called[peer_id] = _Called(at_s=now(), silent=silent, answer=answer)
        self._waiting.pop(peer_id, None)
