"""Company: which other trainers of the run this peer reaches, asked by a call of no effect.

A trainer that reaches no other one would spend the run's rounds on work of its own. It waits
instead, if the run asks for more than one (docs/protocol.md, part 2, "Alone"). With short windows a
run has many rounds in the seconds after which a peer is sure: so after each round that was its own
alone it holds the next window back, until another trainer has answered. A pair that stays apart is
reported with the heartbeats, so that people learn of it in the lobby.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from atoll.coordinator.run.notice import Report
from atoll.coordinator.run.status import MAX_UNREACHED
from atoll.dht.tasks import together
from atoll.dht.transport import PING, Refused, Transport, TransportError
from atoll.peer import notices

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
    show: Report
    """takes what the owner of this peer should know"""
    clock: Callable[[], float] = time.monotonic
    reaches_nobody: bool = False
    """True if no other trainer was reached for `ALONE_S`, or the last of them has left"""
    unreached: tuple[str, ...] = ()
    """PeerIDs of trainers that were not reached for `APART_S`; at most `MAX_UNREACHED`"""
    _asked: dict[str, Asked] = field(default_factory=dict)
    _nobody_since_s: float | None = None
    _is_in_doubt: bool = False
    """True after a round of this peer alone, until another trainer has answered"""
    _is_due_now: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: dict[int, Callable[[], None]] = field(default_factory=dict)
    """by fragment: what offers this peer's work"""

    @property
    def is_alone(self) -> bool:
        """Return whether this peer waits for another one; any thread may ask."""
        return self.needs_others and (self.reaches_nobody or self._is_in_doubt)

    def decided(self, members: Collection[str], me: str) -> None:
        """Note a round that was decided: after one of this peer alone, ask the others at once."""
        if self.needs_others and list(members) == [me]:
            self._is_in_doubt = True
            self._is_due_now.set()

    async def pause(self) -> None:
        """Return when the next look is due."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY_S):
                await self._is_due_now.wait()
        self._is_due_now.clear()

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
        now_s, had_company = self.clock(), bool(self._asked)
        self._asked = {peer: known for peer, known in self._asked.items() if peer in trainers}
        again_s = AGAIN_S * max(1.0, len(trainers) / ASKED_AT_ONCE)
        due = [peer for peer in trainers if self._is_due(peer, now_s, again_s)]
        due.sort(key=lambda peer: self._asked[peer].asked_s if peer in self._asked else -1.0)
        await together(*map(self._look_at, due[:ASKED_AT_ONCE]))
        self._note(trainers, have_left=had_company and not trainers)

    def _is_due(self, peer: str, now_s: float, again_s: float) -> bool:
        known = self._asked.get(peer)
        if self._is_in_doubt or known is None or known.failing_since_s is not None:
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

    def _note(self, trainers: Collection[str], *, have_left: bool) -> None:
        now_s, before = self.clock(), self.unreached
        failing = {
            p: a.failing_since_s for p, a in self._asked.items() if a.failing_since_s is not None
        }
        apart = sorted(peer for peer, since_s in failing.items() if now_s - since_s >= APART_S)
        self.unreached = tuple(apart[:MAX_UNREACHED])
        for peer in self.unreached:
            if peer not in before:
                self.show("warning", notices.apart(peer=peer))
        is_nobody_here = len(failing) >= len(trainers)
        self._note_nobody(is_now=is_nobody_here, trainers=len(trainers), have_left=have_left)

    def _note_nobody(self, *, is_now: bool, trainers: int, have_left: bool) -> None:
        now_s, reached_nobody = self.clock(), self.reaches_nobody
        if is_now:
            since_s = self._nobody_since_s = self._nobody_since_s or now_s
            self.reaches_nobody = have_left or reached_nobody or now_s - since_s >= ALONE_S
        else:
            self._nobody_since_s, self.reaches_nobody, self._is_in_doubt = None, False, False
        if self.needs_others and self.reaches_nobody != reached_nobody:
            alone = notices.alone(trainers=trainers)
            self.show("info", alone if self.reaches_nobody else notices.company())
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
