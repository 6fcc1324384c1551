"""Holdings keep each byte of the positions in flight once, and none of decided ones."""

import pytest
import torch

from atoll.dht.transport import PeerUnreachable
from atoll.optim.log.entry import Entry, sha256
from atoll.optim.state.layout import CELL, Layout
from atoll.peer.rounds.context import Decoded, Holdings
from atoll.peer.rounds.fetching import fetch_part
from support.strikes import passed
from support.swarm import run_swarm

LAYOUT = Layout(names=("w",), shapes=((6 * CELL,),))


def entry_at(peer, position):
    return Entry.decode(peer.replica.store.get(position).entry)


@pytest.mark.parametrize("codec", ["int8", "zstd(int8)"])
def test_no_body_is_held_twice_after_a_commit(tmp_path, codec):
    async def scenario(swarm):
        peers = await swarm.start(3, window_s=1.0)
        await swarm.until(lambda: passed(peers, 0))
        for peer in peers:
            parts = entry_at(peer, 0).parts
            assert len(parts) > 1
            bodies = [memoryview(peer.ctx.parts.body(part.digest)) for part in parts]
            assert len({id(body.obj) for body in bodies}) == 1
            memory = memoryview(bodies[0].obj)
            assert b"".join(bodies) == peer.replica.store.body(0)
            assert memory.nbytes < 1.1 * sum(map(len, bodies))

    run_swarm(tmp_path, scenario, codec=codec, layout=LAYOUT)


def test_a_part_of_the_last_entry_is_served_from_the_log(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3, window_s=1.0)
        await swarm.until(lambda: passed(peers, 1))
        donor, asking = peers[:2]
        names = [donor.identity.peer_id]
        entry = entry_at(donor, 1)
        for ctx in (donor.ctx, asking.ctx):
            ctx.parts.decided_up_to(2)
        for part in entry.parts:
            assert donor.ctx.parts.body(part.digest) is None
            body = await fetch_part(asking.ctx, names, part.digest, part.wire_bytes)
            assert sha256(body) == part.digest
        donor.replica.store.drop_bodies([1])
        with pytest.raises(PeerUnreachable):
            await fetch_part(asking.ctx, names, entry.parts[0].digest, entry.parts[0].wire_bytes)

    run_swarm(tmp_path, scenario, codec="int8", layout=LAYOUT)


def test_a_reduction_that_begins_again_drops_the_values_of_the_one_before():
    held, values = Holdings(), torch.zeros(8)
    held.put(3, b"digest", b"body", Decoded(0, 1, values))
    held.put(4, b"digest", b"body", Decoded(0, 1, values))
    held.begin(3, object())
    assert held.decoded(3, b"digest", (0, 1)) is None
    assert held.decoded(4, b"digest", (0, 1)) is values
    assert held.body(b"digest") == b"body"
