"""Dissemination of entries and groups along a tree: a peer sends to at most eight others.

With P members an entry has some 190 P bytes, half of it deflated; a leader that sent it to each
of a thousand would need eight seconds. A message also names the peers to which its receiver
forwards it, once that has verified the certificate and holds the body. If a peer does not take it
within a stall, the next of its branch gets it, with the rest of the branch. A peer that takes it
but does not forward it only costs time: a peer that hears of no decision asks others for it.
Groups go the same way (`closing.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TypeVar

from atoll.dht.tasks import Tasks
from atoll.dht.transport import TransportError
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.deflating import deflated
from atoll.peer.rounds.messages import Announced, Decided

FAN_OUT = 8  # a thousand peers in four steps, and eight copies of an entry are what one sends
T = TypeVar("T")

CALL_STALLS = 4  # of a call that may have to fetch parts before it answers


Body = Callable[[Sequence[str]], bytes]
"""Returns the message for a peer that forwards it to these."""


class Tree:
    """Calls of one method that peers forward."""

    def __init__(self, ctx: Context, method: str) -> None:
        """Nothing under way."""
        self._ctx = ctx
        self._method = method
        self._tasks = Tasks()

    async def tell(self, peers: Sequence[str], body: Body) -> None:
        """Return when one peer of each branch has taken it, or none has."""
        await asyncio.gather(*(self._tell_branch(branch, body) for branch in branches(peers)))

    def spawn(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Do something until it is done or the tree is closed."""
        return self._tasks.spawn(work)

    async def close(self) -> None:
        """End what is under way."""
        await self._tasks.close()

    async def _tell_branch(self, branch: Sequence[str], body: Body) -> None:
        for index, peer in enumerate(branch):
            call = self.spawn(self._call(peer, body(branch[index + 1 :])))
            await asyncio.wait({call}, timeout=self._ctx.settings.stall_s)
            if call.done() and not call.cancelled() and call.result():
                return

    async def _call(self, peer: str, body: bytes) -> bool:
        """Return whether the peer took it; one that did not looks for decisions by itself."""
        timeout_s = CALL_STALLS * self._ctx.settings.stall_s
        with suppress(TransportError):
            await self._ctx.transport.call(peer, self._method, body, timeout_s=timeout_s)
            return True
        return False


class Dissemination:
    """Announces the newest decided entry, to each peer at most once."""

    def __init__(self, ctx: Context) -> None:
        """Nothing is announced yet."""
        self._ctx = ctx
        self._tree = Tree(ctx, "commit")
        self._entry = b""
        self._told: set[str] = set()

    async def tell(self, decided: Decided, peers: Sequence[str]) -> None:
        """Announce an entry; return when one peer of each branch has taken it, or none has.

        Args:
            decided: verified.
            peers: those that surely live first: they pass it on.
        """
        if decided.entry != self._entry:
            self._entry, self._told = decided.entry, {self._ctx.me.peer_id}
        new = [peer for peer in dict.fromkeys(peers) if peer not in self._told]
        self._told.update(new)
        await self._tree.tell(new, _announcing(decided))

    def pass_on(self, decided: Decided, peers: Sequence[str]) -> None:
        """`tell`, in the background."""
        if peers:
            self._tree.spawn(self.tell(decided, peers))

    async def close(self) -> None:
        """End what is under way."""
        await self._tree.close()


def _announcing(decided: Decided) -> Body:
    entry = deflated(decided.entry)

    def body(tell: Sequence[str]) -> bytes:
        announced = Announced(entry=entry, certificate=decided.certificate, tell=tuple(tell))
        return announced.encode()

    return body


def branches(peers: Sequence[str]) -> list[tuple[str, ...]]:
    """At most eight branches of nearly equal size; the first peers begin them."""
    return [tuple(peers[start::FAN_OUT]) for start in range(min(FAN_OUT, len(peers)))]
