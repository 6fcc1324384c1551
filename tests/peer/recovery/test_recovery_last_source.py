"""Recovery where the coordinator is all that is left to ask."""

import asyncio
from dataclasses import dataclass

import pytest

from atoll.coordinator.run.keys import RunKeys
from atoll.dht.testing import MemoryBoard
from atoll.dht.testing.memory import run_virtual
from atoll.optim.log.live_replica import LiveReplica
from atoll.peer.recovery.errors import NoWay
from atoll.peer.recovery.recovery import Recovery
from atoll.peer.recovery.sources import RosterSources
from atoll.peer.rounds.messages import Decided, Known
from support import kit
from support.logs import Log, LogSource
from support.swarm import Swarm, signed_epoch


class Follower:
    """What a coordinator is to a peer: the whole log, and snapshots of its own choice."""

    name = "coordinator"

    def __init__(self, peer, snapshots):
        self.peer, self.snapshots = peer, snapshots
        self.first_body = 0

    async def head(self):
        held = {"snapshots": tuple(self.snapshots), "first_body": 0}
        return self.peer.rounds.head(Known(epoch=None)).model_copy(update=held)

    async def headers(self, start, stop):
        records = self.peer.replica.store.headers(start, stop - start)
        return [Decided(entry=r.entry, certificate=r.certificate) for r in records]

    async def signed_root(self, position):
        return None

    async def body(self, position, start, into, *, gives_way=False):
        into[:] = self.peer.replica.store.body(position)[start : start + len(into)]

    async def leaf_digests(self, position, count):
        return self.peer.replica.snapshots[position].leaves()

    async def leaves(self, position, indices):
        for index in indices:
            yield index, self.peer.replica.snapshots[position].read_leaf(index)


def recover(tmp_path, snapshots, *, second_epoch=False):
    """A new peer, and what it recovered, with the coordinator as its only donor."""

    async def main():
        swarm = Swarm(tmp_path)
        try:
            peers = await swarm.start(2)
            await swarm.until(lambda: all(p.replica.position >= 11 for p in peers))
            if second_epoch:
                place = min(p.replica.position for p in peers)
                chain = next(p.replica.chain for p in peers if p.replica.position == place)
                record = signed_epoch(2, place, chain, [p.ctx.me for p in peers])
                for peer in peers:
                    await peer.replica.adopt(record)
                    await peer.catch_up()
                await swarm.until(lambda: all(p.replica.position > place + 1 for p in peers))
            new = swarm.add()
            new.ctx.roster = MemoryBoard().roster(new.identity.peer_id)  # of a run without peers
            donor = peers[0]
            offered = [p for p in snapshots(donor.replica) if p in donor.replica.snapshots]
            recovery = Recovery(
                new.replica,
                RosterSources(new.ctx),
                genesis=new.genesis,
                stall_s=new.ctx.settings.stall_s,
                on_event=new.ctx.on_event,
                on_progress=lambda what, left: None,
                fallback=Follower(donor, offered),
            )
            recovered = await recovery.run()
            assert new.replica.position >= 11
            assert new.replica.electorate
            new.replica.store.close()
            return recovered
        finally:
            await swarm.stop()

    return run_virtual(main())


@pytest.mark.parametrize("second_epoch", [False, True])
def test_snapshots_without_a_certified_root_cost_a_replay(tmp_path, second_epoch):
    recovered = recover(
        tmp_path, lambda replica: [max(replica.snapshots)], second_epoch=second_epoch
    )
    assert recovered.snapshot_position == 0


@pytest.mark.parametrize("second_epoch", [False, True])
def test_a_certified_snapshot_is_taken(tmp_path, second_epoch):
    recovered = recover(tmp_path, lambda replica: replica.snapshots, second_epoch=second_epoch)
    assert recovered.snapshot_position > 0


class Organiser(LogSource):
    """A coordinator that signs the root of its newest state."""

    async def signed_root(self, position):
        state = self.log.states[position]
        return self.log.signed_root(position, state) if position in self.snapshots else None


@dataclass(kw_only=True)
class Lost:
    """A run in which the body of entry 7 is nowhere, and a peer that comes after the first."""

    log: Log
    late: LiveReplica

    def recover(self, peers, coordinator=None):
        async def listed():
            return iter([peers])

        recovery = Recovery(
            self.late,
            listed,
            genesis=asyncio.Event().wait,
            stall_s=0.2,
            on_event=lambda level, text: None,
            on_progress=lambda what, left: None,
            fallback=coordinator,
        )
        return asyncio.run(asyncio.wait_for(recovery.run(), 20.0))


@pytest.fixture
def lost(tmp_path):
    log = Log(tmp_path, swarm=kit.Swarm(), keys=RunKeys.generate())
    log.grow(1)
    late = log.open("late", is_ledger=False)
    late.adopt(log.whole.epoch_record)
    late.accept(*log.entries[0])
    log.grow(8)
    yield Lost(log=log, late=LiveReplica(late, compute=asyncio.to_thread))
    log.whole.store.close()
    late.store.close()


def test_a_signed_root_is_the_way_past_an_update_that_is_nowhere(lost):
    """The body of entry 7 is lost, and no entry certifies a state after it."""
    peer = LogSource(lost.log, name="a", first_body=8, snapshots=(6, 8))
    coordinator = Organiser(lost.log, name="coordinator", first_body=8, snapshots=(9,))
    recovered = lost.recover([peer], coordinator)
    assert recovered.snapshot_position == 9 == lost.late.position
    assert lost.late.state.root() == lost.log.whole.state.root()
    assert lost.late.electorate == lost.log.whole.electorate


def test_a_certified_snapshot_comes_before_a_signed_one(lost):
    peer = LogSource(lost.log, name="a", first_body=6, snapshots=(6, 8))
    coordinator = Organiser(lost.log, name="coordinator", first_body=8, snapshots=(9,))
    assert lost.recover([peer], coordinator).snapshot_position == 6


def test_without_the_coordinator_an_update_that_is_nowhere_is_waited_for(lost):
    peer = LogSource(lost.log, name="a", first_body=8, snapshots=(6, 8))
    with pytest.raises(NoWay):
        lost.recover([peer])
    assert lost.late.position == 1
