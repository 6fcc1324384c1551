"""A follower's recovery: nobody publishes to it, and it wants what peers have pruned."""

import asyncio

import pytest

from atoll.coordinator.run.keys import RunKeys
from atoll.optim.log.live_replica import LiveReplica
from atoll.peer.recovery.recovery import Recovery
from support import kit
from support.logs import Log, LogSource, open_replica


@pytest.fixture
def log(tmp_path):
    log = Log(tmp_path, swarm=kit.Swarm(), keys=RunKeys.generate())
    log.grow(9)
    yield log
    log.whole.store.close()


class Opening(LogSource):
    """A peer that also tells which epoch the run is in."""

    async def head(self):
        head = await super().head()
        return head.model_copy(update={"epoch_record": self.log.whole.epoch_record})


def recover(log, peer, coordinator=None):
    """Return a follower of the log that has recovered from them, closed."""
    core = open_replica(log.folder / "follower", log.keys, follows=True)

    async def listed():
        return iter([[peer]])

    async def main():
        recovery = Recovery(
            LiveReplica(core, compute=asyncio.to_thread),
            listed,
            genesis=asyncio.Event().wait,
            stall_s=0.2,
            on_event=lambda level, text: None,
            on_progress=lambda what, left: None,
            fallback=coordinator,
        )
        await asyncio.wait_for(recovery.run(), 20.0)

    asyncio.run(main())
    head, first_body = core.head, core.store.first_with_bodies()
    core.store.close()
    return head, first_body


def test_it_learns_the_epoch_and_fetches_what_a_coordinator_waits_for(log):
    peer = Opening(log, name="a", first_body=0, snapshots=(0,))
    assert recover(log, peer) == (log.whole.head, 0)


@pytest.mark.parametrize("has_all", [True, False])
def test_updates_before_its_snapshot_come_from_the_coordinator(log, has_all):
    peer = Opening(log, name="a", first_body=6, snapshots=(6, 8))
    coordinator = LogSource(log, name="coordinator", first_body=0, snapshots=(8,))
    found = recover(log, peer, coordinator if has_all else None)
    assert found == (log.whole.head, 0 if has_all else 6)
