"""A peer that was away while an epoch opened: it stands before the base, where nobody votes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from atoll.coordinator.run.keys import RunKeys
from atoll.optim.log.live_replica import LiveReplica, Recovered
from atoll.optim.log.replica import Replica
from atoll.peer.recovery.recovery import Recovery
from atoll.peer.recovery.sources import Source
from support import kit
from support.logs import Log, LogSource, take


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """Six entries, an epoch that opened after them, and two more."""
    log = Log(tmp_path, swarm=kit.Swarm(), keys=RunKeys.generate())
    log.grow(1)
    log.early = log.whole.epoch_record
    log.grow(5)
    log.whole.open_epoch(log.swarm.electors(), log.keys.sign)
    log.grow(2)
    yield log
    log.whole.store.close()


def late(log: Log) -> Replica:
    """A peer that knows the epoch, and has no entry."""
    replica = log.open("late", is_ledger=False)
    replica.adopt(log.early)
    return replica


def recover(log: Log, replica: Replica, **has: object) -> Recovered | None:
    replica.adopt(log.whole.epoch_record)
    assert not replica.electorate

    async def listed() -> Iterator[Sequence[Source]]:
        return iter([[LogSource(log, name="donor", **has)]])

    async def main() -> Recovered | None:
        recovery = Recovery(
            LiveReplica(replica, compute=asyncio.to_thread),
            listed,
            genesis=asyncio.Event().wait,
            stall_s=1.0,
            on_event=lambda level, text: None,
            on_progress=lambda what, left: None,
        )
        return await asyncio.wait_for(recovery.run(), 20.0)

    found = asyncio.run(main())
    assert replica.head == log.whole.head
    assert replica.state.root() == log.whole.state.root()
    assert replica.electorate == log.whole.electorate
    replica.store.close()
    return found


def test_the_entries_that_are_missing_bring_it_to_the_base_and_on(log: Log) -> None:
    replica = late(log)
    replica.accept(*log.entries[0])
    found = recover(log, replica, first_body=1, snapshots=())
    assert found is not None and (found.snapshot_position, found.entries) == (None, 7)


def test_an_entry_that_is_void_costs_a_snapshot(log: Log) -> None:
    replica = late(log)
    other = take(replica, log.swarm, lr=0.25)
    assert other != log.entries[0][0].entry
    found = recover(log, replica, first_body=1, snapshots=(4,))
    assert found is not None and found.snapshot_position == 4
