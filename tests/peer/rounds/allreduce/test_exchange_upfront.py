"""Codes that leave before the group closes: they arrive, count once, and are refused by name."""

import asyncio
import gc
from types import SimpleNamespace

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.testing.memory import run_virtual
from atoll.dht.transport import Refused
from atoll.optim.log.entry import Entry
from atoll.peer.rounds.allreduce import exchange
from atoll.peer.rounds.allreduce.exchange import Exchange
from atoll.peer.rounds.consensus.ballots import leader_of
from atoll.peer.rounds.messages import REDUCE, UPFRONT, PartPlan, Upfront, tagged
from atoll.peer.rounds.policies import kept_parts, split_cells
from support.streams import heads, send
from support.strikes import expect_no_work_lost, expect_sums, passed
from support.swarm import run_swarm

SLOW_MBIT_S = 2.0  # a vector of 200 kB takes 0.8 s


def test_from_the_second_round_on_codes_leave_upfront(tmp_path, monkeypatch):
    seen = heads(monkeypatch)

    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: passed(peers, 3))
        assert 0 in seen[REDUCE]
        assert {1, 2, 3} & set(seen[REDUCE]) == set()
        assert {1, 2, 3} <= set(seen[UPFRONT])
        assert swarm.same_bits(peers)
        expect_sums(swarm, peers[0])

    run_swarm(tmp_path, scenario)


def reduce_s(peer):
    trace = peer.settled[-1].trace
    return trace.send_s + trace.reduce_s


def reduced_in(folder):
    """Seconds of a round between two slow links that are ready and a fast one that comes late."""
    took = []

    async def scenario(swarm):
        links = [SLOW_MBIT_S, SLOW_MBIT_S, 100.0]
        peers = [swarm.add(link_mbit_s=link, declared_mbit_s=link) for link in links]
        for peer in peers:
            peer.transport.downlink_bytes_s = 0.0
        peers[2].window_s = 7.5
        await swarm.begin(peers)
        await swarm.until(lambda: passed(peers, 3))
        took.append(reduce_s(peers[0]))
        assert all(len(entry.complete_members()) == 3 for entry in log(peers[0]))
        assert swarm.same_bits(peers)

    run_swarm(folder, scenario, codec="int8")
    return took[0]


def test_who_waits_for_a_straggler_has_sent_its_codes_by_then(tmp_path, monkeypatch):
    """Their uplinks have only results left to carry."""
    upfront_s = reduced_in(tmp_path / "upfront")
    monkeypatch.setattr("atoll.peer.rounds.consensus.member.begin_upfront", lambda *_: None)
    assert upfront_s < 0.6 * reduced_in(tmp_path / "late")


def test_a_connection_lost_before_the_group_closes_costs_no_place(tmp_path):
    """What waits at an owner is lost with its stream, and sent again."""

    async def scenario(swarm):
        peers = await swarm.start(4, window_s=5.0)
        peers[3].window_s = 7.5
        await swarm.until(lambda: passed(peers, 2))
        position = peers[0].replica.position
        leader = leader_of(peers[0].replica.electorate, position, 0).peer_id
        a, b = [p for p in peers[:3] if p.identity.peer_id != leader][:2]
        await swarm.until(lambda: {p.rounds.statistics().phase for p in (a, b)} == {"wait"})
        await asyncio.sleep(0.5)
        swarm.network.reset(a.identity.peer_id, b.identity.peer_id)
        await swarm.until(lambda: passed(peers, position))
        assert len(log(a)[position].complete_members()) == 4
        assert swarm.same_bits(peers)
        expect_sums(swarm, a)

    run_swarm(tmp_path, scenario)


def test_what_a_round_holds_is_let_go_when_it_is_over(tmp_path):
    """Not when the collector comes by: an exchange has some bytes for each value of the model."""

    async def scenario(swarm):
        peers = await swarm.start(3, window_s=2.0)
        await swarm.until(lambda: passed(peers, 5))
        await swarm.until(lambda: all(p.rounds.statistics().phase == "train" for p in peers))
        await asyncio.sleep(1.0)
        alive = gc.get_objects()
        assert [o.group.position for o in alive if type(o) is Exchange] == []
        assert sum(o._messages.qsize() for o in alive if type(o) is exchange.HeldStream) == 0

    gc.collect()
    gc.disable()
    try:
        run_swarm(tmp_path, scenario)
    finally:
        gc.enable()


def log(peer):
    rows = peer.replica.store.headers(0, peer.replica.position)
    return [Entry.decode(row.entry) for row in rows]


def test_a_joiner_that_owns_parts_makes_the_others_send_again(tmp_path, monkeypatch):
    """The cut is another one then: upfront codes are refused, and sent as the group says."""
    seen = heads(monkeypatch)

    async def scenario(swarm):
        slow = [swarm.add(declared_mbit_s=2.0) for _ in range(3)]
        await swarm.begin(slow)
        await swarm.until(lambda: passed(slow, 2))
        joiner = swarm.add(declared_mbit_s=500.0)
        await joiner.start()
        await swarm.until(lambda: passed([*slow, joiner], 5))
        cut_anew = [p for p in seen[REDUCE] if p]
        assert cut_anew
        assert set(cut_anew) <= set(seen[UPFRONT])
        owners = {e.members[part.owner].peer_id for e in log(slow[0])[3:] for part in e.parts}
        assert joiner.identity.peer_id in owners
        assert swarm.same_bits([*slow, joiner])
        expect_sums(swarm, slow[0])

    run_swarm(tmp_path, scenario)


def test_an_owner_that_died_while_training_costs_no_work(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: passed(peers, 2))
        peers[3].kill()
        rest, killed_at = peers[:3], peers[0].replica.position
        await swarm.until(lambda: passed(rest, killed_at + 2))
        assert swarm.same_bits(rest)
        for peer in rest:
            expect_no_work_lost(peer)

    run_swarm(tmp_path, scenario)


def test_what_was_withdrawn_is_not_counted(tmp_path):
    """A contribution that is offered anew has another norm: codes of the old one are of no use."""

    async def scenario(swarm):
        peers = await swarm.start(3, window_s=5.0)
        peers[2].window_s = 7.5
        await swarm.until(lambda: passed(peers, 2))
        await asyncio.sleep(6.0)
        first = next(iter(peers[0].under_way.values()))
        peers[0].rounds.withdraw()
        peers[0].drift_N *= 2.0
        peers[0].work_N += peers[0].drift_N / 2.0
        peers[0].under_way.clear()
        peers[0].latest.clear()
        peers[0].offers.clear()
        peers[0]._hand_in(0, peers[0].drift_N.clone())
        second = next(iter(peers[0].under_way.values()))
        assert second.offer.norm != first.offer.norm
        position = peers[0].replica.position
        await swarm.until(lambda: passed(peers, position))
        entry = log(peers[1])[position]
        norms = {m.peer_id: m.norm for m in entry.members}
        assert norms[peers[0].identity.peer_id] == second.offer.norm
        assert swarm.same_bits(peers)
        for peer in peers:
            expect_no_work_lost(peer)

    run_swarm(tmp_path, scenario)


def test_upfront_codes_that_fit_nothing_are_refused_by_name(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: passed(peers, 2))
        owner = peers[0]
        position = owner.replica.position
        plan = exchange.expected_plan(owner.ctx, position)
        mine = [i for i, p in enumerate(plan.parts) if p.owner == owner.identity.peer_id]
        theirs = [i for i, p in enumerate(plan.parts) if p.owner != owner.identity.peer_id]
        fields = {"position": position, "plan": plan.digest, "part": mine[0]}
        fields |= {"norm": 1.0}
        member, stranger = peers[1].transport, swarm.network.transport("stranger")
        assert (await send(stranger, owner, "reduce", head(fields))).code is RefusalCode.NOT_UPFRONT
        for change in (
            {"position": position - 1},
            {"position": position + 1},
            {"plan": bytes(32)},
            {"part": theirs[0]},
            {"part": 10_000},
        ):
            refusal = await send(member, owner, "reduce", head(fields | change))
            assert refusal.code is RefusalCode.NOT_UPFRONT, change
        cells = b"C" + bytes((1 << 20) - 1)
        refusal = await send(member, owner, "reduce", head(fields), cells)
        assert refusal.code is RefusalCode.NOT_UPFRONT
        await swarm.until(lambda: passed(peers, position + 1))
        assert swarm.same_bits(peers)
        expect_sums(swarm, peers[0])

    run_swarm(tmp_path, scenario)


def head(fields):
    return tagged(UPFRONT, Upfront(**fields))


def test_a_held_stream_gives_what_came_in_order_and_no_more_than_its_limit():
    class Fake:
        remote, method = "peer", "reduce"

        def __init__(self, messages):
            self.messages = list(messages)

        async def recv(self, *, timeout_s):
            if not self.messages:
                await asyncio.sleep(1000.0)
            return self.messages.pop(0)

        async def close(self):
            pass

    async def main():
        async with exchange.HeldStream(Fake([b"", b"Cab", b"", b"Ccd", None]), 6, 1.5) as held:
            got = [await held.recv(timeout_s=1.0) for _ in range(5)]
        assert got == [b"", b"Cab", b"", b"Ccd", None]
        async with exchange.HeldStream(Fake([b"Cab", b"Ccd", b"Cef"]), 6, 1.5) as held:
            assert [await held.recv(timeout_s=1.0) for _ in range(2)] == [b"Cab", b"Ccd"]
            with pytest.raises(Refused, match=RefusalCode.TOO_LONG):
                await held.recv(timeout_s=1.0)

    run_virtual(main())


def plans(*cuts):
    return [PartPlan(start_cell=a, stop_cell=b, owner=o) for a, b, o in cuts]


SIZES = [1_000_000] * 200


def kept(last, rates, turn=1, megabits=1_600.0):
    best, even = split_cells(SIZES, rates), split_cells(SIZES, [1.0] * len(rates))
    chosen = kept_parts(last, best, even, rates, turn=turn, megabits=megabits)
    return "last" if chosen is last else "best" if chosen is best else "even"


def test_the_last_cut_is_kept_while_it_is_nearly_as_good():
    even = split_cells(SIZES, [100.0] * 4)
    for slow, chosen in ((95.0, "last"), (60.0, "best"), (20.0, "best")):
        rates = [100.0, slow, 100.0, 100.0]
        found = [kept(even, rates, turn) for turn in range(1, 7)]
        assert found == [chosen, "last", "last", "last", chosen, "last"]
    assert kept(plans((0, 100, 0), (100, 200, 1)), [9.0, 9.0]) == "last"


def test_an_uneven_cut_goes_where_an_even_one_would_do():
    """What was read of a busy link made it: 48 and 87 Mbit/s of four links of 200."""
    uneven = split_cells(SIZES, [50.6, 48.0, 87.2, 87.6])
    assert kept(uneven, [50.0, 50.0, 50.0, 50.0]) == "even"
    assert kept(uneven, [40.1, 38.7, 47.8, 33.8]) == "even"
    assert kept(uneven, [50.6, 48.0, 87.2, 87.6]) == "last"


def test_parts_are_even_where_uneven_ones_save_no_time_that_counts():
    """Two ways of 0.85 MB over four links of 200 Mbit/s, of which one was read to be slow."""
    even, rates = split_cells(SIZES, [1.0] * 4), [200.0, 40.0, 200.0, 200.0]
    assert kept(even, rates) == "best"
    assert kept(even, rates, megabits=6.8) == "last"
    assert kept(split_cells(SIZES, rates), [200.0] * 4, megabits=6.8) == "even"
    of_three = plans((0, 67, 0), (67, 134, 1), (134, 200, 2))
    assert kept(of_three, [200.0, 200.0, 200.0, 40.0], megabits=6.8) == "even"
    assert kept(even, [20.0, 4.0, 20.0, 20.0], megabits=6.8) == "best"


def test_codes_of_a_part_that_another_owns_are_not_kept(tmp_path):
    async def scenario(swarm):
        mine, other, _ = peers = await swarm.start(3)
        await swarm.until(lambda: passed(peers, 2))
        plan = exchange.expected_plan(mine.ctx, mine.replica.position)
        owners = set()
        for index, part in enumerate(plan.parts):
            head = Upfront(position=plan.position, plan=plan.digest, part=index, norm=1.0)
            owners.add(part.owner)
            if part.owner == mine.identity.peer_id:
                assert exchange.check_upfront(mine.ctx, other.identity.peer_id, head) > 0
                continue
            with pytest.raises(Refused) as refusal:
                exchange.check_upfront(mine.ctx, other.identity.peer_id, head)
            assert refusal.value.code is RefusalCode.NOT_UPFRONT
        assert len(owners) == 3

    run_swarm(tmp_path, scenario)


def test_codes_of_another_contribution_do_not_count():
    """They came before the group closed; their sender has reported another one since."""
    ours = Exchange.__new__(Exchange)
    ours.digest, ours._plan, ours._rows = b"g" * 32, b"p" * 32, None
    ours.group = SimpleNamespace(members=[SimpleNamespace(norm=2.0)])
    ours._state = SimpleNamespace(member=lambda remote: 0)
    head = Upfront(position=0, plan=b"p" * 32, part=0, norm=2.0)
    assert ours.takes_upfront("b", head).group == ours.digest
    for changes in ({"norm": 1.0}, {"plan": b"q" * 32}):
        with pytest.raises(Refused) as refusal:
            ours.takes_upfront("b", head.model_copy(update=changes))
        assert refusal.value.code is RefusalCode.NOT_UPFRONT
