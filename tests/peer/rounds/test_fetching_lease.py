"""A snapshot stays with its donors while a joiner fetches it, however fast rounds go on."""

import asyncio

import pytest

from atoll.dht.testing.memory import run_virtual
from atoll.optim.log.entry import sha256
from atoll.peer.recovery.sources import PeerSource
from support.swarm import Swarm

WINDOW_S = 0.2  # a snapshot in two rounds of half a second
PAUSE_S = 6.0  # between two requests


def passed(peers, position):
    return all(peer.replica.position >= position for peer in peers)


@pytest.mark.exhaustive
def test_a_snapshot_that_is_fetched_slowly_is_given_to_its_end(tmp_path):
    async def main():
        swarm = Swarm(tmp_path, codec="int4")
        try:
            peers = await swarm.start(3, window_s=WINDOW_S)
            await swarm.until(lambda: passed(peers, 4))
            donor = peers[0]
            position, began = max(donor.replica.snapshots), donor.replica.position
            source = PeerSource(swarm.add().ctx, donor.identity.peer_id)
            count = donor.replica.snapshots[position].num_leaves
            digests, leaves = await source.leaf_digests(position, count), {}
            for index in range(len(digests)):
                await asyncio.sleep(PAUSE_S)
                leaves |= {i: leaf async for i, leaf in source.leaves(position, [index])}
            assert donor.replica.position >= began + 8  # four snapshots later
            assert [sha256(leaves[i]) for i in sorted(leaves)] == digests
        finally:
            await swarm.stop()

    run_virtual(main())


def test_a_lease_ends_and_one_snapshot_is_kept_at_a_time(tmp_path):
    async def main():
        swarm = Swarm(tmp_path)
        try:
            peers = await swarm.start(3)
            replica = peers[0].replica
            await swarm.until(lambda: passed(peers, 4))
            leased, other = sorted(replica.snapshots)[:2]
            assert replica.lease(leased).position == leased
            assert replica.lease(other).position == other
            await swarm.until(lambda: passed(peers, 6))
            assert leased in replica.snapshots
            assert set(replica.snapshots) == {leased} | set(peers[1].replica.snapshots)
            await swarm.until(lambda: passed(peers, 12))
            assert leased not in replica.snapshots
            assert replica.lease(leased) is None
        finally:
            await swarm.stop()

    run_virtual(main())
