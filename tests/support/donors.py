"""A coordinator whose log was lost or damaged, and a peer that holds all of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from atoll.coordinator.heads import AskHead, PeerHead
from atoll.optim.log.live_replica import LiveReplica, Recovered
from atoll.optim.log.replica import Replica
from atoll.peer.recovery.recovery import Recovery
from atoll.peer.recovery.sources import Source
from atoll.peer.rounds.messages import PROTOCOL, Decided, Head
from support import kit


class Clock:
    """Time passes by hand, from now: the coordinator has measured by the machine's clock so far."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def __call__(self) -> float:
        return self.now_s


class StoreSource:
    """A peer that has all of a log."""

    name = "12D3KooWdonor"

    def __init__(self, replica: Replica) -> None:
        self.replica, self.store = replica, replica.store

    async def head(self) -> Head:
        head = self.replica.head
        return Head(
            protocol=PROTOCOL,
            epoch=head.epoch,
            position=head.position,
            chain=head.chain,
            incarnation="1",
            role="trainer",
            ready_in_s=0.0,
            first_body=0,
            snapshots=(),
            epoch_record=self.replica.epoch_record,
        )

    async def headers(self, start: int, stop: int) -> list[Decided]:
        records = self.store.headers(start, stop - start)
        return [Decided(entry=r.entry, certificate=r.certificate) for r in records]

    async def body(
        self, position: int, start: int, into: memoryview, *, gives_way: bool = False
    ) -> None:
        into[:] = self.store.body(position)[start : start + len(into)]


def recovering(*sources: Source) -> Callable[..., Awaitable[Recovered | None]]:
    """A `Recover` that knows these sources."""

    async def listed() -> Iterator[Sequence[Source]]:
        return iter([sources])

    async def recover(replica: LiveReplica, on_taken: Callable[[int], None]) -> Recovered | None:
        recovery = Recovery(
            replica,
            listed,
            genesis=asyncio.Event().wait,
            stall_s=5.0,
            on_event=lambda level, text: None,
            on_progress=lambda what, left: None,
            on_taken=on_taken,
        )
        return await recovery.run()

    return recover


def answering(swarm: kit.Swarm, donor: Replica) -> AskHead:
    async def ask(peer_id: str) -> PeerHead | None:
        if peer_id not in {identity.peer_id for identity in swarm.identities}:
            return None
        return PeerHead(
            peer_id=peer_id,
            incarnation="1",
            epoch=donor.epoch,
            position=donor.position,
            chain=donor.chain,
            epoch_record=donor.epoch_record,
        )

    return ask
