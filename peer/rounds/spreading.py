"""How a decided entry reaches everyone: along a tree, so that nobody sends it to more than eight.

With P members an entry has some 190 P bytes; a leader that sent it to each of a thousand would be
at it for fifteen seconds.  Who is told an entry is also told whom to pass it on to, and does so
once it has verified the certificate and holds the body.  Who does not take it within a stall is
passed over: the next of its branch is told, and told of the rest.  One that takes it and does not
pass it on costs the others time alone: who hears of no decision looks for it at others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence

from atoll.peer.rounds.context import Context
from atoll.peer.rounds.messages import Announced, Decided

FAN_OUT = 8  # a thousand peers in four steps, and eight copies of an entry are what one sends
CALL_STALLS = 4  # of a call that may have to fetch parts before it answers


class Spreading:
    """What this peer tells of the newest decided entry."""

    def __init__(self, ctx: Context) -> None:
        """Nothing told yet."""
        self._ctx = ctx
        self._entry = b""
        self._told: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def tell(self, decided: Decided, peers: Sequence[str]) -> None:
        """Tell peers of an entry, each at most once, until those that were called have answered.

        Args:
            decided: verified.
            peers: those that surely live first: they pass it on.
        """
        if decided.entry != self._entry:
            self._entry, self._told = decided.entry, {self._ctx.me.peer_id}
        new = [peer for peer in dict.fromkeys(peers) if peer not in self._told]
        self._told.update(new)
        await asyncio.gather(*(self._tell_branch(decided, branch) for branch in branches(new)))

    def pass_on(self, decided: Decided, peers: Sequence[str]) -> None:
        """`tell`, in the background."""
        if peers:
            self._spawn(self.tell(decided, peers))

    async def close(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tell_branch(self, decided: Decided, branch: Sequence[str]) -> None:
        for index, peer in enumerate(branch):
            call = self._spawn(self._call(peer, decided, branch[index + 1 :]))
            await asyncio.wait({call}, timeout=self._ctx.settings.stall_s)
            if call.done() and not call.cancelled() and call.exception() is None:
                return

    async def _call(self, peer: str, decided: Decided, rest: Sequence[str]) -> None:
        body = Announced(
            entry=decided.entry, certificate=decided.certificate, tell=tuple(rest)
        ).encode()
        timeout_s = CALL_STALLS * self._ctx.settings.stall_s
        await self._ctx.transport.call(peer, "commit", body, timeout_s=timeout_s)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a peer that could not be told: said nowhere, it looks by itself


def branches(peers: Sequence[str]) -> list[tuple[str, ...]]:
    """At most eight branches of nearly equal size; the first peers begin them."""
    return [tuple(peers[start::FAN_OUT]) for start in range(min(FAN_OUT, len(peers)))]
