"""Publishing: a peer of a run with a log sends the coordinator the entries that it lacks.

The coordinator is a follower of the log. It gets each entry from its proposer at once; whatever it
missed, it asks for in its answers to heartbeats.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from atoll.coordinator.rpc.client import Beat
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.optim.log.entry import Certificate, Entry, LogError
from atoll.optim.log.live import LiveReplica
from atoll.optim.log.store import NotStored, StoreHead
from atoll.peer.daemon.environment import Environment
from atoll.peer.recovery.sources import CoordinatorSource
from atoll.peer.rounds.engine import Rounds

_log = logging.getLogger(__name__)


class Publisher:
    """One peer's relation to the coordinator; a `Listener` of its heartbeats."""

    def __init__(
        self, env: Environment, source: CoordinatorSource, replica: LiveReplica, rounds: Rounds
    ) -> None:
        """Keep in `source` where the coordinator stands."""
        self._env = env
        self._source = source
        self._replica = replica
        self._rounds = rounds
        self._publishing = False
        self._told_pruned = False

    def on_led(self, entry: Entry, certificate: Certificate, body: bytes) -> None:
        """Send an entry that this peer proposed, at once."""
        self._env.tasks.spawn(
            self._publish, entry.epoch, entry.position, entry.encode(), certificate.encode(), body
        )

    def stored_all(self) -> bool:
        """Return whether the coordinator has every entry that this peer has."""
        return self.stored(self._replica.position)

    def stored(self, position: int) -> bool:
        """Return whether the coordinator has every entry before a position."""
        return self._source.position >= position

    # the listener

    def has_retired(self) -> bool:
        """Return whether this peer has given up its vote from here on."""
        return self._rounds.retired

    def note_head(self, head: StoreHead) -> None:
        """Take where the coordinator stands."""
        self._source.epoch = head.epoch
        self._source.position = head.position
        self._source.chain = head.chain

    async def heed(self, beat: Beat) -> None:
        """Adopt a new epoch, catch up if the coordinator is ahead, send what it asks for."""
        if beat.epoch:
            self._source.epoch_record = beat.epoch
            with suppress(LogError):
                if not await self._replica.adopt(beat.epoch):
                    self._rounds.kick_catch_up()
        if beat.head.position > self._replica.position + 1:  # one ahead is a commit on its way here
            self._rounds.kick_catch_up()
        if beat.publish_from is not None and not self._publishing:
            self._publishing = True
            self._env.tasks.spawn(self._publish_from, beat.publish_from)

    async def _publish_from(self, start: int) -> None:
        try:
            for position in range(start, self._replica.position):
                if not await self._publish_stored(position):
                    return
        finally:
            self._publishing = False

    async def _publish_stored(self, position: int) -> bool:
        record = await self._env.compute(self._replica.store.get, position)
        if record is None:
            return False
        try:
            body = await self._env.compute(self._replica.store.body, position)
        except NotStored:
            if not self._told_pruned:
                self._env.say(
                    "warning",
                    f"the coordinator lacks entry {position}, whose body was pruned here to stay "
                    "within round.log_mb; if no peer has kept it, the coordinator resumes from a "
                    "snapshot",
                )
            self._told_pruned = True
            return False
        return await self._publish(record.epoch, position, record.entry, record.certificate, body)

    async def _publish(
        self, epoch: int, position: int, entry: bytes, certificate: bytes, body: bytes
    ) -> bool:
        try:
            published = await self._env.client.publish(
                epoch=epoch, position=position, entry=entry, certificate=certificate, body=body
            )
        except CoordinatorError as error:
            _log.info("entry %d is not with the coordinator yet: %s", position, error)
            return False
        self.note_head(published.head)
        return published.head.position > position
