"""The coordinator's recovery: its ledger catches up with the peers of the run's DHT.

The coordinator is seldom behind, because peers publish to it what they decide. It recovers when no
peer has kept the bodies that it lacks, or when its own snapshots cannot be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from atoll.coordinator.heads import PeerHead
from atoll.coordinator.run.levels import LOGGING
from atoll.coordinator.run.text import clean
from atoll.dht.roster import PeerRecord, Roster, RosterError
from atoll.dht.transport import PeerUnreachable, Transport, TransportError
from atoll.optim.log.entry import LogError
from atoll.optim.log.live_replica import LiveReplica, OnTaken, Recovered
from atoll.peer.recovery.recovery import Recovery
from atoll.peer.recovery.sources import PeerSource, Source, whom_to_ask
from atoll.peer.rounds.context import RoundSettings, fetch_head
from atoll.peer.rounds.messages import Head
from atoll.peer.rounds.pacing import Link

CONNECT_S = 10.0  # a peer of the roster may be gone
STALL_S = 5.0  # patience with a donor; nobody waits for the coordinator
RECORDS_S = 1.0  # the roster as calls of one look read it
READ_S = 2.0  # most of a peer's patience (`heads.PATIENCE_S`) is for its own dial

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LedgerRecovery:
    """Recovers a coordinator's replica; see `atoll.coordinator.catching_up.Recover`."""

    me: str
    """The PeerID of the coordinator's node."""
    transport: Transport
    roster: Roster

    async def __call__(self, replica: LiveReplica, on_taken: OnTaken) -> Recovered | None:
        """Catch up if peers do not publish what is missing.

        Raises:
            RecoveryError: no peer has it now.
        """
        recovery = Recovery(
            replica,
            _FromRoster(me=self.me, transport=self.transport, roster=self.roster, replica=replica),
            genesis=lambda: replica.compute(
                replica.store.load_snapshot, 0, replica.replay.memory_dtype
            ),
            stall_s=STALL_S,
            on_event=lambda level, text: _log.log(LOGGING[level], clean(text)),
            on_progress=lambda what, left: _log.info("%s, %d to go", what, left),
            on_taken=on_taken,
        )
        return await recovery.run()


@dataclass(kw_only=True)
class LedgerHeads:
    """Asks a peer where it stands; see `atoll.coordinator.heads.AskHead`."""

    me: str
    """The PeerID of the coordinator's node."""
    transport: Transport
    roster: Roster
    _records: dict[str, PeerRecord] = field(default_factory=dict)
    _read_at: float = -math.inf
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, peer_id: str) -> PeerHead | None:
        """Return a peer's answer; None without one."""
        record = (await self._known()).get(peer_id)
        try:
            if record is not None:  # else it may be connected all the same
                await self.transport.connect(peer_id, record.addresses, timeout_s=CONNECT_S)
            # The epoch's record is part of every answer.
            head = await fetch_head(
                self.transport, self.roster, peer_id, epoch=None, timeout_s=STALL_S
            )
        except (TransportError, LogError, TimeoutError, ValueError, OSError):
            return None
        return PeerHead(
            peer_id=peer_id,
            incarnation=head.incarnation or "",  # without one it cannot be elected
            epoch=head.epoch,
            position=head.position,
            chain=head.chain,
            epoch_record=head.epoch_record,
        )

    async def _known(self) -> dict[str, PeerRecord]:
        """Return the roster, which the calls of one look read once."""
        loop = asyncio.get_running_loop()
        async with self._reading:
            if loop.time() - self._read_at > RECORDS_S:
                with contextlib.suppress(TimeoutError):  # then those of before
                    async with asyncio.timeout(READ_S):
                        self._records = await _peers_of(self.roster)
                self._read_at = loop.time()
        return self._records


async def _peers_of(roster: Roster) -> dict[str, PeerRecord]:
    try:
        return dict(await roster.peers())
    except (RosterError, TransportError, TimeoutError, OSError) as error:
        _log.info("cannot read the roster: %s", clean(error))
        return {}


@dataclass(kw_only=True)
class _FromRoster:
    """The peers of the roster, to which nothing need be connected yet."""

    me: str
    transport: Transport
    roster: Roster
    replica: LiveReplica
    link: Link = field(default_factory=Link)
    turn: int = 0

    @property
    def settings(self) -> RoundSettings:
        return RoundSettings(stall_s=STALL_S, grace_s=STALL_S)

    @property
    def known_epoch(self) -> int | None:
        return self.replica.epoch

    async def __call__(self) -> Iterator[Sequence[Source]]:
        records = await _peers_of(self.roster)
        self.turn += 1  # others are drawn each time, so that no silent peer is asked without end
        return (
            [_Distant(self, records[peer]) for peer in some]
            for some in whom_to_ask(records, me=self.me, turn=self.turn)
        )


class _Distant(PeerSource):
    """A peer to which the coordinator connects before it asks."""

    def __init__(self, known: _FromRoster, record: PeerRecord) -> None:
        super().__init__(known, record.peer_id)
        self._transport = known.transport
        self._record = record

    async def head(self) -> Head:
        record = self._record
        try:
            await self._transport.connect(record.peer_id, record.addresses, timeout_s=CONNECT_S)
        except (TimeoutError, ValueError) as error:  # the record may name anything
            raise PeerUnreachable(f"{record.peer_id}: {error}") from error
        return await super().head()
