"""A relay dies in mid-round, and with it the session of a member whose leader it reached."""

import pytest

from atoll.dht.addresses import through
from atoll.optim.log.entry import Certificate, Entry
from atoll.peer.rounds.consensus.round import RETURN_STALLS, leader_of, term_of
from support.strikes import expect_no_work_lost, expect_sums, passed
from support.swarm import SETTINGS, identity_of, run_swarm

BEHIND = 2, 3
"""numbers of the peers behind routers: each reaches the other through the relay"""


async def hidden_pair(swarm):
    """Start two peers that all can dial, and two behind the first."""
    relay = f"/ip4/11.0.0.1/tcp/1/p2p/{identity_of(0).peer_id}"
    peers = []
    for number in range(4):
        behind = (through(relay, identity_of(number).peer_id),) if number in BEHIND else ()
        peers.append(
            swarm.add(window_s=1.0, link_mbit_s=8.0, declared_mbit_s=8.0, addresses=behind)
        )
    return await swarm.begin(peers)


def leads(peers, position):
    elector = leader_of([p.ctx.me for p in peers], position, 0)
    return next(p for p in peers if p.ctx.me == elector)


def entry_at(peer, position):
    record = peer.replica.store.headers(position, position + 1)[0]
    return Entry.decode(record.entry), Certificate.decode(record.certificate)


async def until_pair_leads(swarm, peers):
    """Return the next position led by a peer behind a router, once its owners are settled."""
    await swarm.until(lambda: passed(peers, 1))
    while leads(peers, position := peers[0].replica.position) not in peers[BEHIND[0] :]:
        await swarm.until(lambda position=position: passed(peers, position))
    return position


@pytest.mark.parametrize("message", [1, 30, 73])
def test_nobody_that_lives_is_left_out_when_a_relay_dies(tmp_path, message):
    """The relay owns parts too; the member takes another relay, and no part is without it."""

    async def scenario(swarm):
        peers = await hidden_pair(swarm)
        position = await until_pair_leads(swarm, peers)
        relay, rest = peers[0], peers[1:]
        seen = []

        def strike(src, dst, method, n):
            if method == "reduce" and relay.identity.peer_id in (src, dst):
                seen.append(swarm.now())
                if len(seen) == message:
                    swarm.network.reset(*(p.identity.peer_id for p in peers[2:]), at_relay=True)
                    relay.kill()

        swarm.network.on_message = strike
        await swarm.until(lambda: passed(rest, position))
        entry, certificate = entry_at(rest[0], position)
        assert term_of(certificate.attempt) == 0
        assert {p.ctx.me for p in rest} <= {m.elector for m in entry.complete_members()}
        if message > 1:  # after the group was closed
            assert any(part.generation for part in entry.parts)
        await swarm.until(lambda: passed(rest, position + 1))
        assert swarm.same_bits(rest)
        expect_sums(swarm, rest[0])
        for peer in rest:
            expect_no_work_lost(peer)

    run_swarm(tmp_path, scenario)


def test_a_member_that_does_not_return_is_waited_for_a_while_only(tmp_path):
    async def scenario(swarm):
        peers = await hidden_pair(swarm)
        position = await until_pair_leads(swarm, peers)
        leader = leads(peers, position)
        member = next(p for p in peers[2:] if p is not leader)
        struck_at = []

        def strike(src, dst, method, n):
            if method == "reduce" and member.identity.peer_id == src and not struck_at:
                struck_at.append(swarm.now())
                pair = leader.identity.peer_id, member.identity.peer_id
                swarm.network.reset(*pair, at_relay=True)
                member.kill()

        swarm.network.on_message = strike
        rest = [p for p in peers if p is not member]
        await swarm.until(lambda: passed(rest, position))
        assert swarm.now() - struck_at[0] < (RETURN_STALLS + 1) * SETTINGS.stall_s
        await swarm.until(lambda: passed(rest, position + 1))
        assert swarm.same_bits(rest)

    run_swarm(tmp_path, scenario)


def test_parts_are_fetched_from_peers_that_need_no_relay(tmp_path):
    """A late member that fetched a body from its leader, through a relay, came late again."""

    async def scenario(swarm):
        peers = await hidden_pair(swarm)
        late, leader = peers[3], peers[2]
        late.window_s = 7.0
        asked = []

        def note(src, dst, method, n):
            if method == "part" and src == late.identity.peer_id:
                asked.append(dst)

        swarm.network.on_message = note
        await swarm.until(lambda: passed(peers, 8))
        shown = late.rounds.statistics()
        assert shown.included < shown.rounds  # so it had parts to fetch
        assert asked and leader.identity.peer_id not in asked

    run_swarm(tmp_path, scenario)
