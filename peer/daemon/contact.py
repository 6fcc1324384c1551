"""Staying in touch with the coordinator: heartbeats, renewals, and entries that it lacks.

None of it is needed for training: while the coordinator is away the peer goes on, and what the
coordinator missed is sent when it asks for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from atoll.coordinator.rpc.client import Beat, CoordinatorClient, Joined
from atoll.coordinator.rpc.client_errors import CoordinatorError, NotWelcome
from atoll.coordinator.run.levels import Level
from atoll.dht.node import Node
from atoll.optim.log.entry import Certificate, Entry, LogError
from atoll.optim.log.replica import Replica
from atoll.optim.log.store import Head, NotStored
from atoll.peer.daemon.reporting import Reporter
from atoll.peer.recovery.sources import CoordinatorSource
from atoll.peer.rounds.engine import Rounds

MAX_SENT = 32  # events and traces of one heartbeat
MAX_PAUSE_S = 15.0

_log = logging.getLogger(__name__)


class Heartbeats:
    """What every peer says to the coordinator, and hears from it."""

    def __init__(
        self,
        *,
        client: CoordinatorClient,
        node: Node,
        reporter: Reporter,
        on_joined: Callable[[Joined], None],
        say: Callable[[Level, str], None],
    ) -> None:
        """``on_joined`` is told when this peer had to join again."""
        self._client = client
        self._node = node
        self._reporter = reporter
        self._on_joined = on_joined
        self._say = say
        self.in_touch = True

    async def keep(self) -> None:
        """Be in touch, for ever."""
        pause_s = 1.0
        while True:
            try:
                beat = await self._beat_or_join()
                if not self.in_touch:
                    self._say("info", "in touch with the coordinator again")
                pause_s, self.in_touch = beat.heartbeat_s, True
            except CoordinatorError as error:
                if self.in_touch:
                    self._say("warning", f"out of touch with the coordinator, going on: {error}")
                self.in_touch, pause_s = False, min(2 * pause_s, MAX_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def beat(self, *, leaving: bool = False) -> Beat:
        """Send one heartbeat and heed the answer; what could not be sent stays for the next."""
        events = _take(self._reporter.events)
        traces = _take(self._reporter.traces)
        retired = leaving and self.has_retired()  # before the status: it holds from there on
        try:
            beat = await self._client.heartbeat(
                await self._reporter.status(),
                events=events,
                traces=traces,
                leaving=leaving,
                retired=retired,
            )
        except CoordinatorError:
            self._reporter.events.extendleft(reversed(events))
            self._reporter.traces.extendleft(reversed(traces))
            raise
        await self._heed(beat)
        return beat

    def has_retired(self) -> bool:
        """Whether this peer has no vote from where it stands on."""
        return False

    def note_head(self, head: Head) -> None:
        """Where the coordinator stands."""

    async def _heed(self, beat: Beat) -> None:
        self.note_head(beat.head)
        if beat.admission:
            self._node.transport.admission = beat.admission
        if beat.bootstrap:
            self._node.bootstrap = beat.bootstrap

    async def _beat_or_join(self) -> Beat:
        try:
            return await self.beat()
        except NotWelcome:
            joined = await self._client.join()
            self._node.transport.admission = joined.admission
            self._on_joined(joined)
            return await self.beat()


class Contact(Heartbeats):
    """One peer's relation to the coordinator of a run with a log."""

    def __init__(
        self,
        *,
        client: CoordinatorClient,
        source: CoordinatorSource,
        node: Node,
        replica: Replica,
        rounds: Rounds,
        reporter: Reporter,
        compute: Callable[..., Awaitable[Any]],
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
        on_joined: Callable[[Joined], None],
        say: Callable[[Level, str], None],
    ) -> None:
        """As `Heartbeats`; entries are sent with ``spawn``."""
        super().__init__(client=client, node=node, reporter=reporter, on_joined=on_joined, say=say)
        self._source = source
        self._replica = replica
        self._rounds = rounds
        self._compute = compute
        self._spawn = spawn
        self._publishing = False
        self._told_pruned = False

    def on_led(self, entry: Entry, certificate: Certificate, body: bytes) -> None:
        """Send an entry that this peer led, at once."""
        self._spawn(
            self._publish(entry.epoch, entry.position, entry.encode(), certificate.encode(), body)
        )

    def stored_all(self) -> bool:
        """Whether the coordinator has every entry that this peer has."""
        return self.stored(self._replica.position)

    def stored(self, position: int) -> bool:
        """Whether the coordinator has every entry before a position."""
        return self._source.position >= position

    def has_retired(self) -> bool:
        """See `Rounds.retired`."""
        return self._rounds.retired

    def note_head(self, head: Head) -> None:
        """Where the coordinator stands."""
        self._source.epoch = head.epoch
        self._source.position = head.position
        self._source.chain = head.chain

    async def _heed(self, beat: Beat) -> None:
        await super()._heed(beat)
        if beat.epoch:
            self._source.epoch_record = beat.epoch
            with suppress(LogError):
                if not await self._replica.adopt(beat.epoch):
                    self._rounds.kick_catch_up()
        if beat.head.position > self._replica.position + 1:
            self._rounds.kick_catch_up()
        if beat.publish_from is not None and not self._publishing:
            self._publishing = True
            self._spawn(self._publish_from(beat.publish_from))

    async def _publish_from(self, start: int) -> None:
        try:
            for position in range(start, self._replica.position):
                if not await self._publish_stored(position):
                    return
        finally:
            self._publishing = False

    async def _publish_stored(self, position: int) -> bool:
        record = await self._compute(self._replica.store.get, position)
        if record is None:
            return False
        try:
            body = await self._compute(self._replica.store.body, position)
        except NotStored:
            self._tell_pruned(position)
            return False
        return await self._publish(record.epoch, position, record.entry, record.certificate, body)

    def _tell_pruned(self, position: int) -> None:
        if not self._told_pruned:
            self._say(
                "warning",
                f"the coordinator lacks entry {position}, whose body was pruned here to stay "
                "within round.log_mb; if no peer has kept it, it goes on from a snapshot",
            )
        self._told_pruned = True

    async def _publish(
        self, epoch: int, position: int, entry: bytes, certificate: bytes, body: bytes
    ) -> bool:
        try:
            published = await self._client.publish(
                epoch=epoch, position=position, entry=entry, certificate=certificate, body=body
            )
        except CoordinatorError as error:
            _log.info("entry %d is not with the coordinator yet: %s", position, error)
            return False
        self.note_head(published.head)
        return published.head.position > position


def _take(waiting: Any) -> list[Any]:  # noqa: ANN401
    return [waiting.popleft() for _ in range(min(MAX_SENT, len(waiting)))]
