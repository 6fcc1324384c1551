"""Staying in touch with the coordinator by heartbeats.

Training needs none of it: while the coordinator is away the peer continues.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

from atoll.coordinator.rpc.client import Beat, Joined
from atoll.coordinator.rpc.client_errors import (
    CoordinatorError,
    CoordinatorUnreachable,
    NotWelcome,
)
from atoll.optim.log.store import StoreHead
from atoll.peer.daemon.environment import Environment
from atoll.peer.daemon.reporting import Reporter

FIRST_PAUSE_S = 1.0  # the coordinator gives the next ones
MAX_PAUSE_S = 15.0  # between tries while it is away


class Listener(Protocol):
    """What a kind of run does with the coordinator's answers."""

    def note_head(self, head: StoreHead) -> None:
        """Take where the coordinator stands."""
        ...

    async def heed(self, beat: Beat) -> None:
        """Do what the coordinator asks for."""
        ...

    def has_retired(self) -> bool:
        """Return whether this peer has given up its vote from here on."""
        ...


class Heartbeats:
    """Sends what a peer reports, and heeds the answers."""

    def __init__(
        self, env: Environment, reporter: Reporter, listener: Listener, *, in_touch: bool
    ) -> None:
        """`in_touch` is whether the coordinator was there when this peer started."""
        self._env = env
        self._reporter = reporter
        self._listener = listener
        self.in_touch = in_touch

    async def keep(self) -> None:
        """Be in touch, for ever."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                beat = await self._beat_or_join()
                if not self.in_touch:
                    self._env.say("info", "in touch with the coordinator again")
                pause_s, self.in_touch = beat.heartbeat_s, True
            except CoordinatorError as error:
                if self.in_touch:
                    text = f"out of touch with the coordinator, training continues: {error}"
                    self._env.say("warning", text)
                self.in_touch, pause_s = False, min(2 * pause_s, MAX_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def beat(self, *, leaving: bool = False) -> Beat:
        """Send one heartbeat and heed the answer; keep what could not be sent for the next.

        Raises:
            CoordinatorError: the coordinator is away, or refuses this peer.
        """
        events, traces = self._env.outbox.take()
        # Asked before the status is taken, as it holds from the position in the status on.
        retired = leaving and self._listener.has_retired()
        try:
            beat = await self._env.client.heartbeat(
                await self._reporter.status(),
                events=events,
                traces=traces,
                leaving=leaving,
                retired=retired,
            )
        except CoordinatorError:
            self._env.outbox.put_back(events, traces)
            raise
        self._listener.note_head(beat.head)
        if beat.admission:
            self._env.node.transport.admission = beat.admission
        if beat.bootstrap:
            self._env.node.bootstrap = beat.bootstrap
        await self._listener.heed(beat)
        return beat

    async def leave(self) -> None:
        """Say goodbye.

        Raises:
            CoordinatorError: the coordinator is away.
        """
        self._reporter.leaving = True
        await self.beat(leaving=True)

    async def join_late(self) -> Joined | None:
        """Join if the coordinator is back; None if it is not."""
        with suppress(CoordinatorUnreachable):
            joined = await self._env.join_again()
            self._listener.note_head(joined.head)
            self.in_touch = True
            return joined
        return None

    async def _beat_or_join(self) -> Beat:
        try:
            return await self.beat()
        except NotWelcome:  # the coordinator restarted without its sessions, or dropped ours
            await self._env.join_again()
            return await self.beat()
