"""Company: which other trainers of the run this peer reaches, asked by a call of no effect.

A trainer that reaches no other one would spend the run's rounds on work of its own. It waits
instead, if the run asks for more than one (docs/protocol.md, part 2, "Alone"). A pair that stays
apart is reported with the heartbeats, so that people learn of it in the lobby.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.status import CANNOT_REACH, MAX_UNREACHED
from atoll.dht.identity import short
from atoll.dht.tasks import together
from atoll.dht.transport import PING, Refused, Transport, TransportError

LOOK_EVERY_S = 2.0  # two looks within `ALONE_S`
ALONE_S = 5.0  # without anybody: one call may fail, and the first look at the roster is empty
ASK_S = 7.0  # libp2p does not dial again for 5 s after a failure
ASKED_AT_ONCE = 8  # of those that are due: bounds the calls of a large run
AGAIN_S = 10.0  # after an answer; longer in a run in which more than `ASKED_AT_ONCE` are asked
APART_S = 15.0  # of failures, before a pair is reported: a peer that was killed is gone by then


@dataclass
class Asked:
    """The last answer of one trainer."""

    asked_s: float
    failing_since_s: float | None = None


Ask = Callable[[str], Awaitable[bool]]
"""Calls a peer; returns whether it answered."""


@dataclass(kw_only=True)
class Company:
    """The other trainers, as far as this peer reaches them; one task keeps it."""

    ask: Ask
    needs_others: bool
    """whether the run asks for more than one trainer"""
    show: Callable[[Level, str], None]
    """takes what the owner of this peer should know"""
    clock: Callable[[], float] = time.monotonic
    reaches_nobody: bool = False
    """True if no other trainer was reached for `ALONE_S`"""
    unreached: tuple[str, ...] = ()
    """PeerIDs of trainers that were not reached for `APART_S`; at most `MAX_UNREACHED`"""
    _asked: dict[str, Asked] = field(default_factory=dict)
    _nobody_since_s: float | None = None
    _waiting: dict[int, Callable[[], None]] = field(default_factory=dict)
    """by fragment: what offers this peer's work"""

    @property
    def is_alone(self) -> bool:
        """Return whether this peer waits for another one; any thread may ask."""
        return self.needs_others and self.reaches_nobody

    def with_others(self, fragment: int, offer: Callable[[], None]) -> None:
        """Offer at once, or as soon as another trainer is reached; the newest of a fragment."""
        if self.is_alone:
            self._waiting[fragment] = offer
        else:
            offer()

    def withdraw(self) -> None:
        """Forget what waits: the state that it belongs to is gone."""
        self._waiting.clear()

    async def look(self, trainers: Collection[str]) -> None:
        """Ask the trainers that are due, and note who is reached.

        Args:
            trainers: PeerIDs of the other ones in the roster.
        """
        now_s = self.clock()
        self._asked = {peer: known for peer, known in self._asked.items() if peer in trainers}
        again_s = AGAIN_S * max(1.0, len(trainers) / ASKED_AT_ONCE)
        due = [peer for peer in trainers if self._is_due(peer, now_s, again_s)]
        due.sort(key=lambda peer: self._asked[peer].asked_s if peer in self._asked else -1.0)
        await together(*map(self._look_at, due[:ASKED_AT_ONCE]))
        self._note(trainers)

    def _is_due(self, peer: str, now_s: float, again_s: float) -> bool:
        known = self._asked.get(peer)
        if known is None or known.failing_since_s is not None:
            return True
        return now_s - known.asked_s >= again_s

    async def _look_at(self, peer: str) -> None:
        before = self._asked.get(peer)
        is_reached = await self.ask(peer)
        now_s = self.clock()
        since_s = before.failing_since_s if before is not None else None
        self._asked[peer] = Asked(
            asked_s=now_s,
            failing_since_s=None if is_reached else now_s if since_s is None else since_s,
        )

    def _note(self, trainers: Collection[str]) -> None:
        now_s, before = self.clock(), self.unreached
        failing = {
            p: a.failing_since_s for p, a in self._asked.items() if a.failing_since_s is not None
        }
        apart = sorted(peer for peer, since_s in failing.items() if now_s - since_s >= APART_S)
        self.unreached = tuple(apart[:MAX_UNREACHED])
        for peer in self.unreached:
            if peer not in before:
                self.show("warning", f"this peer and {short(peer)} {CANNOT_REACH}")
        self._note_nobody(is_now=len(failing) >= len(trainers), trainers=len(trainers))

    def _note_nobody(self, *, is_now: bool, trainers: int) -> None:
        now_s, was_alone = self.clock(), self.is_alone
        self._nobody_since_s = (self._nobody_since_s or now_s) if is_now else None
        since_s = self._nobody_since_s
        self.reaches_nobody = since_s is not None and now_s - since_s >= ALONE_S
        if self.is_alone and not was_alone:
            whom = "reaches no other trainer" if trainers else "is the only trainer here"
            self.show(
                "info",
                f"waiting for peers: this peer {whom}; training resumes when another one is online",
            )
        if was_alone and not self.is_alone:
            self.show("info", "another trainer is online; training resumes")
        if not self.is_alone:
            waiting, self._waiting = self._waiting, {}
            for offer in waiting.values():
                offer()


def asking(transport: Transport) -> Ask:
    """Return how to ask over a transport; a refusal is an answer too."""

    async def ask(peer: str) -> bool:
        try:
            await transport.call(peer, PING, b"", timeout_s=ASK_S)
        except Refused:
            return True
        except (TransportError, TimeoutError, OSError, ValueError):
            return False
        return True

    return ask
