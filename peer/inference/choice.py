"""Which peer of a stage serves a text: at random, in proportion to the announced throughput.

What goes wrong is told apart, as for microbatches (`atoll.peer.pipeline.wiring`):

    busy         a short pause, never a ban
    lost         a ban of a second that doubles with each failure in a row, with jitter
    silent       the same from 4 s on; so for a peer that cannot be reached
    moved        not asked for that position of its log again
    off          not asked again: its owner serves no texts
    refuses      not asked again: it serves texts, but not this one
    lied         not asked again: its answer had another shape, or numbers that are not finite

An answer that is used ends a ban. A new incarnation of a peer is another peer. An announcement
counts within a factor of the median, so that no claim attracts all texts. Peers are not pinged: the
first question measures as well.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from atoll.dht.roster import PeerRecord
from atoll.peer.pipeline.wiring import (
    CREDULITY,
    FIRST_BAN_S,
    JITTER,
    MAX_BAN_S,
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    UNREACHABLE_FROM,
    Backoff,
)

Trouble = Literal["busy", "lost", "silent", "moved", "off", "refuses", "lied"]

IN_WORDS: dict[Trouble, str] = {
    "busy": "busy",
    "lost": "lost",
    "silent": "without an answer",
    "moved": "at another round",
    "off": "serving no texts",
    "refuses": "refusing this text",
    "lied": "with a false answer",
}


@dataclass(kw_only=True)
class _Server:
    record: PeerRecord
    ban: Backoff = field(default_factory=lambda: Backoff(first_s=FIRST_BAN_S, max_s=MAX_BAN_S))
    paused_until_s: float = -math.inf
    moved_from: int | None = None
    """position of its log that it has left"""
    is_out: bool = False
    trouble: Trouble | None = None

    def is_free(self, position: int | None, now_s: float) -> bool:
        has_moved = position is not None and position == self.moved_from
        return (
            not (self.is_out or has_moved) and max(self.paused_until_s, self.ban.until_s) <= now_s
        )


class Servers:
    """The peers of one stage, as one client knows them."""

    def __init__(self, module: str, rng: random.Random) -> None:
        """Begin without any; `rng` chooses, and spreads pauses."""
        self.module = module
        self._rng = rng
        self._known: dict[str, _Server] = {}

    def look(self, records: Iterable[PeerRecord]) -> None:
        """Take the peers that serve the stage now."""
        here = {each.peer_id: each for each in records if serves(each, (self.module,))}
        for gone in self._known.keys() - here.keys():
            del self._known[gone]
        for peer, record in here.items():
            known = self._known.get(peer)
            if known is None or known.record.incarnation != record.incarnation:
                self._known[peer] = _Server(record=record)
            else:
                known.record = record

    def choose(self, position: int | None, now_s: float) -> PeerRecord | None:
        """Return a peer to ask for a position of the log; None if none is free."""
        free = [one.record for one in self._known.values() if one.is_free(position, now_s)]
        if not free:
            return None
        rates = [_announced(record) for record in free]
        usual = statistics.median([rate for rate in rates if rate] or [1.0])
        believed = [min(max(rate or usual, usual / CREDULITY), usual * CREDULITY) for rate in rates]
        return self._rng.choices(free, weights=believed)[0]

    def have_moved(self, position: int | None) -> bool:
        """Return whether a peer has left a position of the log."""
        return position is not None and any(
            one.moved_from == position for one in self._known.values()
        )

    def answered(self, peer: str) -> None:
        """Note an answer that is used."""
        one = self._known.get(peer)
        if one is not None:
            one.ban.end()
            one.trouble = None

    def was_busy(self, peer: str, retry_s: float, now_s: float) -> None:
        """Note that a peer has no room for a moment."""
        one = self._noted(peer, "busy")
        if one is not None:
            pause_s = min(max(retry_s, MIN_PAUSE_S), MAX_PAUSE_S) * self._rng.uniform(*JITTER)
            one.paused_until_s = now_s + pause_s

    def was_lost(self, peer: str, now_s: float) -> None:
        """Note that the connection to a peer broke."""
        one = self._noted(peer, "lost")
        if one is not None:
            one.ban.fail(now_s, self._rng)

    def was_silent(self, peer: str, now_s: float) -> None:
        """Note that a peer did not answer in time, or cannot be reached."""
        one = self._noted(peer, "silent")
        if one is not None:
            one.ban.failures = max(one.ban.failures, UNREACHABLE_FROM)
            one.ban.fail(now_s, self._rng)

    def has_moved(self, peer: str, position: int | None) -> None:
        """Note that a peer holds a position of the log no longer."""
        one = self._noted(peer, "moved")
        if one is not None:
            one.moved_from = position

    def is_off(self, peer: str) -> None:
        """Note that a peer serves no texts."""
        self._leave_out(peer, "off")

    def refuses(self, peer: str) -> None:
        """Note that a peer will not serve this text."""
        self._leave_out(peer, "refuses")

    def lied(self, peer: str) -> None:
        """Note that an answer was none that an honest peer gives."""
        self._leave_out(peer, "lied")

    def account(self) -> str:
        """Return in words why no peer of the stage serves the text."""
        if not self._known:
            return f"no peer of {self.module} is in the run"
        found: Counter[Trouble | None] = Counter(one.trouble for one in self._known.values())
        told = ", ".join(
            f"{number} {IN_WORDS[trouble] if trouble else 'not asked yet'}"
            for trouble, number in found.items()
        )
        peers = f"{len(self._known)} peer{'s' * (len(self._known) != 1)}"
        return f"{self.module} has {peers}: {told}"

    @property
    def all_are_off(self) -> bool:
        """Return whether there are peers, and none serves texts."""
        return bool(self._known) and all(one.trouble == "off" for one in self._known.values())

    def _leave_out(self, peer: str, trouble: Trouble) -> None:
        one = self._noted(peer, trouble)
        if one is not None:
            one.is_out = True

    def _noted(self, peer: str, trouble: Trouble) -> _Server | None:
        one = self._known.get(peer)
        if one is not None:
            one.trouble = trouble
        return one


def serves(record: PeerRecord, modules: Collection[str]) -> bool:
    """Return whether a peer computes for one of these modules now."""
    is_there = record.place is not None and record.place.duty == "serving"
    return record.role == "trainer" and record.module in modules and is_there


def _announced(record: PeerRecord) -> float:
    return record.place.tokens_per_s if record.place is not None else 0.0
