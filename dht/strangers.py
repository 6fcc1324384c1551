"""A bound on streams whose other side has shown no admission yet.

PeerIDs are free, so strangers share one bound for all together. An honest peer shows its admission
within milliseconds; whoever is silent for longest makes room for newcomers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable

MAX_SILENT = 64  # streams of strangers, of all together
MAX_SILENT_PER_PEER = 4  # of them for longer than a burst
BURST_S = 0.25  # in which a newcomer may open many streams before we read the first admission
ADMITTED_S = 600.0  # after it last showed an admission a peer is a stranger again
MAX_ADMITTED = 8192  # peers remembered for it


class Strangers:
    """The silent streams of one node, of all its protocols."""

    def __init__(self) -> None:
        self._silent: dict[Hashable, tuple[str, float, Callable[[], None]]] = {}
        self._admitted: dict[str, float] = {}

    def __contains__(self, stream: Hashable) -> bool:
        return stream in self._silent

    def why_full(self, peer: str) -> str:
        """Return why a peer may open no more streams now; empty if it may."""
        before_s = asyncio.get_running_loop().time() - BURST_S
        began = [at_s for who, at_s, _ in self._silent.values() if who == peer]
        if sum(at_s < before_s for at_s in began) >= MAX_SILENT_PER_PEER:
            return f"{len(began)} of its streams have not shown an admission"
        return ""

    def enter(self, peer: str, stream: Hashable, drop: Callable[[], None]) -> None:
        """Count a new stream unless its peer is known; `drop` ends the one that makes room."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._admitted.get(peer, 0.0):
            return
        self._silent[stream] = (peer, now_s, drop)
        if len(self._silent) > MAX_SILENT:
            self._make_room()

    def admit(self, peer: str, stream: Hashable) -> None:
        """Note that the peer has shown its admission on this stream."""
        self._silent.pop(stream, None)
        self._admitted.pop(peer, None)
        self._admitted[peer] = asyncio.get_running_loop().time() + ADMITTED_S
        if len(self._admitted) > MAX_ADMITTED:
            self._admitted.pop(next(iter(self._admitted)))

    def leave(self, stream: Hashable) -> None:
        """Note that the stream is gone."""
        self._silent.pop(stream, None)

    def _make_room(self) -> None:
        """Drop the oldest stream of the peer that has most of them."""
        counts = Counter(peer for peer, _, _ in self._silent.values())
        ((most, _),) = counts.most_common(1)
        stream = next(each for each, (peer, _, _) in self._silent.items() if peer == most)
        _, _, drop = self._silent.pop(stream)
        drop()
