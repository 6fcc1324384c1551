"""A relay dies in mid-round, and with it the session of a member whose leader it reached."""

import asyncio

import pytest

from atoll.dht.addresses import through
from atoll.dht.tasks import end
from atoll.dht.transport import PeerUnreachable
from atoll.optim.log.entry import Certificate, Entry
from atoll.optim.state.layout import CELL, Layout
from atoll.peer.rounds.consensus import member as members
from atoll.peer.rounds.consensus.ballots import leader_of, term_of
from atoll.peer.rounds.consensus.round import RETURN_STALLS
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


@pytest.mark.parametrize("message", [1, 73, pytest.param(30, marks=pytest.mark.exhaustive)])
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


def test_a_member_whose_exchange_has_ended_begins_no_other_in_its_group(tmp_path, monkeypatch):
    """It loses its leader early, cannot come back, and reports there again after another entry."""
    begun, again, struck = set(), [], set()
    exchange_of, open_line = members.exchange_of, members._Line.open

    def noted(ctx, group, codes, upfront):
        key = ctx.me.peer_id, group.digest
        again.extend([key] if key in begun else [])
        begun.add(key)
        return exchange_of(ctx, group, codes, upfront)

    async def open_once(line):
        if line._stream is not None:
            await line.close()
            raise PeerUnreachable("no relay reaches it now")
        await open_line(line)

    monkeypatch.setattr(members, "exchange_of", noted)
    monkeypatch.setattr(members._Line, "open", open_once)

    async def cut_off(swarm, bad):
        while True:
            await asyncio.sleep(0.02)
            for position, (flight, _) in list(bad.rounds._flights.items()):
                leader = leader_of(bad.replica.electorate, position, 0)
                is_early = position > bad.replica.position and flight.phase.value == "reduce"
                if is_early and leader != bad.ctx.me and position % 5 == 0:
                    struck.add(position)
                    swarm.network.reset(leader.peer_id, bad.identity.peer_id, at_relay=True)

    async def scenario(swarm):
        swarm.network.default.latency_s = 0.2  # at which reductions overlap
        peers = await swarm.start(3, window_s=0.3, tau=4)
        cutting = asyncio.create_task(cut_off(swarm, peers[2]))
        await swarm.until(lambda: passed(peers, 20), timeout_s=600.0)
        await end(cutting)
        assert struck and again == []

    names = tuple(f"blocks.{i}.w" for i in range(4))
    layout = Layout(names=names, shapes=((CELL + 1_000,),) * 4)
    run_swarm(tmp_path, scenario, method="streaming(count=4)", layout=layout)
