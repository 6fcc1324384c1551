"""A peer sends the coordinator the entries that it lacks, with bodies that are whole."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from atoll.coordinator.run.keys import RunKeys
from atoll.optim.log.live_replica import LiveReplica
from atoll.optim.log.store import StoreHead
from atoll.peer.daemon.log_run import Publisher
from support import kit
from support.logs import Log, flip


class Coordinator:
    """Takes entries, and keeps their bodies."""

    def __init__(self) -> None:
        self.bodies: dict[int, bytes] = {}

    async def publish(self, *, position: int, body: bytes, **entry: Any) -> SimpleNamespace:
        self.bodies[position] = body
        return SimpleNamespace(head=StoreHead(epoch=0, position=position + 1, chain=bytes(32)))


def test_a_body_that_the_disk_has_spoiled_is_dropped_and_not_sent(tmp_path: Path) -> None:
    """It would be refused, and sent again for ever: nobody else would be asked for it."""
    log = Log(tmp_path, swarm=kit.Swarm(), keys=RunKeys.generate())
    log.grow(4)
    peer = log.open("peer", is_ledger=False)
    peer.adopt(log.whole.epoch_record)
    for claim, body in log.entries:
        peer.accept(claim, body)
    peer.store.write_bodies()
    flip(tmp_path / "peer", "bodies", "data", "position = 2")
    coordinator, told = Coordinator(), list[str]()
    env: Any = SimpleNamespace(
        compute=asyncio.to_thread,
        client=coordinator,
        report=lambda level, notice: told.append(notice.code),
    )
    source: Any = SimpleNamespace(epoch=0, position=0, chain=b"")

    async def main() -> None:
        publisher = Publisher(env, source, LiveReplica(peer, compute=asyncio.to_thread), env)
        await publisher._publish_from(0)
        assert coordinator.bodies == {p: log.entries[p][1] for p in (0, 1)}
        assert told == ["coordinator.lacks_entry"]
        record = peer.store.get(2)
        assert record is not None and not record.has_body
        await publisher._publish_from(3)

    asyncio.run(main())
    assert coordinator.bodies.keys() == {0, 1, 3}
    peer.store.close()
    log.whole.store.close()
