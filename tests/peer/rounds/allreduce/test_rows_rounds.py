"""Whole rounds of groups that reduce in rows, with faults, liars and slow links."""

from collections import defaultdict

import pytest
import torch

from atoll.optim.reduction.robust import rule_of
from atoll.optim.state.layout import CELL, Layout
from atoll.peer.rounds import messages, policies
from atoll.peer.rounds.allreduce import exchange
from atoll.peer.rounds.allreduce.rows import RelayedPart, RowReduction
from atoll.peer.rounds.consensus.ballots import leader_of
from atoll.peer.rounds.messages import REDUCE, UPFRONT
from support.cells import use_cells
from support.streams import heads
from support.strikes import COMMIT_S, KINDS, Strike, expect_no_work_lost, expect_sums, run_strike
from support.swarm import reached, run_swarm

CELL_VALUES = 64
PEERS = 9  # in three rows
LAYOUT = Layout(names=("w",), shapes=((5 * CELL_VALUES,),))
LONGER_THAN_A_ROUND = 500


def small_rows(monkeypatch):
    """Nine peers are in three rows."""
    use_cells(monkeypatch, CELL_VALUES)
    monkeypatch.setattr(messages, "RELAYED_ABOVE", 2)
    monkeypatch.setattr(policies, "ROW_SHAPE", 1)


def run(tmp_path, monkeypatch, scenario, **options):
    small_rows(monkeypatch)
    run_swarm(tmp_path, scenario, **({"layout": LAYOUT} | options))


def everyone_counts(peers, position):
    entry = peers[0].settled[position].applied.entry
    return len(entry.complete_members()) == len(entry.members) == len(peers)


def test_the_update_is_the_mean_and_all_hold_the_same_bits(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(PEERS)
        await swarm.until(lambda: reached(peers, 2))
        assert everyone_counts(peers, 0)
        assert everyone_counts(peers, 1)
        assert swarm.same_bits(peers)
        expect_sums(swarm, peers[0])

    run(tmp_path, monkeypatch, scenario)


def test_a_member_reduces_with_few_of_many(tmp_path, monkeypatch):
    many, met = 25, defaultdict(set)

    def meet(src, dst, method, number):
        if method == "reduce":
            met[src].add(dst)

    async def scenario(swarm):
        swarm.network.on_message = meet
        peers = await swarm.start(many)
        await swarm.until(lambda: reached(peers, 1))
        assert everyone_counts(peers, 0)

    run(tmp_path, monkeypatch, scenario, layout=Layout(names=("w",), shapes=((25 * 64,),)))
    assert max(map(len, met.values())) <= 4 + 4 + 5  # its row, a part's relays, owners of its parts


def spoil_sums(reduction):
    """A relay whose sums are too large."""
    make = reduction._make_relayed

    def made(part):
        relayed = make(part)
        encode = relayed.reducer._encode

        def large(first, stop):
            return [scaled(frame, 1e3) for frame in encode(first, stop)]

        relayed.reducer._encode = large
        return relayed

    reduction._make_relayed = made


def scaled(frame, factor):
    values_N = torch.frombuffer(bytearray(frame[1:]), dtype=torch.float32)
    return frame[:1] + (factor * values_N).numpy().tobytes()


def spoil_results(reduction):
    """A relay that passes back other results than the owner sent."""
    pass_back = reduction._pass_back

    async def spoilt(relayed, receiver):
        await pass_back(relayed, receiver)
        relayed.came_back = [bytes(frame[:-1]) + b"?" for frame in relayed.came_back]

    reduction._pass_back = spoilt


@pytest.mark.parametrize("spoil", [spoil_sums, spoil_results])
def test_a_relay_that_lies_costs_its_row_the_way_to_the_owner(tmp_path, monkeypatch, spoil):
    liars = []

    class Spoilt(RowReduction):
        def __init__(self, rows, state, *sides):
            super().__init__(rows, state, *sides)
            if state.ctx.me.peer_id in liars:
                spoil(self)

    async def scenario(swarm):
        monkeypatch.setattr(exchange, "RowReduction", Spoilt)
        peers = [swarm.add() for _ in range(PEERS)]
        liars.append(peers[4].identity.peer_id)
        await swarm.begin(peers)
        await swarm.until(lambda: reached(peers, 2))
        assert everyone_counts(peers, 0)
        assert swarm.same_bits(peers)
        expect_sums(swarm, peers[0])
        assert any(
            "no more sums" in e or "directly to its owner" in e for p in peers for e in p.events
        )

    run(tmp_path, monkeypatch, scenario)


@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_relay_that_falls_silent_after_its_first_sums_is_left_out_alone(
    tmp_path, monkeypatch, kind
):
    async def scenario(swarm):
        peers = await swarm.start(PEERS)
        struck = []
        relay = next(p for p in peers if p.identity.peer_id != leader_of_next(peers))

        def strike(src, dst, method, number):
            sends_sums = any(part.reducer.frames for part in relayed_by(relay))
            if src == relay.identity.peer_id and method == "reduce" and sends_sums and not struck:
                struck.append(swarm.now())
                relay.kill() if kind == "kill" else swarm.network.freeze(src)

        await swarm.until(lambda: reached(peers, 1))
        swarm.network.on_message = strike
        others = [peer for peer in peers if peer is not relay]
        await swarm.until(lambda: struck)
        position = others[0].replica.position
        await swarm.until(lambda: reached(others, position + 1))
        assert swarm.now() - struck[0] <= COMMIT_S[kind]
        entry = others[0].settled[position].applied.entry
        complete = {member.peer_id for member in entry.complete_members()}
        assert complete >= {peer.identity.peer_id for peer in others}
        assert swarm.same_bits(others)
        expect_sums(swarm, others[0])

    run(tmp_path, monkeypatch, scenario)


def test_a_slow_link_that_nobody_knew_of_costs_its_row_nothing(tmp_path, monkeypatch):
    small_rows(monkeypatch)
    use_cells(monkeypatch, CELL)

    async def scenario(swarm):
        peers = [swarm.add(link_mbit_s=20.0, declared_mbit_s=20.0) for _ in range(PEERS - 1)]
        slow = swarm.add(link_mbit_s=0.5, declared_mbit_s=20.0)
        await swarm.begin([*peers, slow])
        await swarm.until(lambda: reached(peers, 1))
        entry = peers[0].settled[0].applied.entry
        complete = {member.peer_id for member in entry.complete_members()}
        assert complete == {peer.identity.peer_id for peer in peers}
        expect_no_work_lost(slow)

    layout = Layout(names=("w",), shapes=((PEERS * CELL,),))
    run_swarm(tmp_path, scenario, layout=layout, codec="int8")


def leader_of_next(peers):
    replica = peers[0].replica
    return leader_of(replica.electorate, replica.position, 0).peer_id


def relayed_by(peer):
    flights = peer.rounds._flights.values()
    exchanges = [flight.pending.exchange for flight, _ in flights]
    parts = [part for x in exchanges if x is not None for part in x._owner.parts.values()]
    return [part for part in parts if isinstance(part, RelayedPart)]


@pytest.mark.parametrize(
    "options",
    [{"rule": rule_of("median")}, {"method": "sparseloco", "codec": None}],
    ids=["robust", "gathered"],
)
def test_what_has_no_sum_is_not_relayed(tmp_path, monkeypatch, options):
    async def scenario(swarm):
        monkeypatch.setattr(exchange, "RowReduction", None)
        peers = await swarm.start(PEERS)
        await swarm.until(lambda: reached(peers, 1))
        assert everyone_counts(peers, 0)

    run(tmp_path, monkeypatch, scenario, **options)


def test_a_group_that_grows_over_the_bound_and_back_counts_everyone(tmp_path, monkeypatch):
    seen = heads(monkeypatch)

    async def scenario(swarm):
        monkeypatch.setattr(messages, "RELAYED_ABOVE", 3)
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 2))
        joiner = swarm.add()
        await joiner.start()
        await swarm.until(lambda: members_of_last(peers[0]) == 4)
        grown = peers[0].replica.position - 1
        await swarm.until(lambda: reached(swarm.peers, grown + 2))
        assert everyone_counts(swarm.peers, grown)
        assert {grown, grown + 1} <= set(seen[REDUCE])  # what came up front was refused
        assert grown in seen[UPFRONT]
        assert grown + 1 not in seen[UPFRONT]
        joiner.kill()
        await swarm.until(lambda: members_of_last(peers[0]) == 3)
        shrunk = peers[0].replica.position - 1
        await swarm.until(lambda: reached(peers, shrunk + 2))
        assert shrunk not in seen[UPFRONT]
        assert shrunk + 1 not in seen[REDUCE]
        assert all(
            peer.ctx.conduct.barred(p.identity.peer_id, swarm.now()) is None
            for peer in peers
            for p in peers
        )
        assert swarm.same_bits(peers)
        expect_sums(swarm, peers[0])

    run(tmp_path, monkeypatch, scenario)


def members_of_last(peer):
    return len(peer.settled[-1].applied.entry.members)


@pytest.mark.parametrize("message", [5, 117, 229])  # freeze and cut
def test_a_fault_at_a_message_of_a_round_in_rows(tmp_path, monkeypatch, message):
    strike_at(tmp_path, monkeypatch, message, *KINDS[message % len(KINDS)])


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "end"), KINDS)
def test_a_fault_at_every_message_of_a_round_in_rows(tmp_path, monkeypatch, kind, end):
    for message in range(1, LONGER_THAN_A_ROUND):
        if strike_at(tmp_path / str(message), monkeypatch, message, kind, end) is None:
            return
    pytest.fail("expected the round to end")


def strike_at(folder, monkeypatch, message, kind, end):
    small_rows(monkeypatch)
    strike = lambda swarm: Strike(swarm, kind, message, end)  # noqa: E731
    return run_strike(folder, PEERS, strike, layout=LAYOUT)
