"""A group reaches every member along a tree, whoever dies, freezes, or keeps it on the way."""

import zlib
from collections import Counter

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.optim.log.entry import MalformedRecord, Member
from atoll.optim.state.layout import Layout
from atoll.peer.rounds.consensus import dissemination
from atoll.peer.rounds.consensus.dissemination import PATIENCE_STALLS, group_of, group_payload
from atoll.peer.rounds.messages import MAX_GROUP_BYTES, Closed, Group, PartPlan, deflated, inflated
from support import strikes
from support.cells import use_cells
from support.strikes import KINDS, Strike, run_strike
from support.swarm import RUN_ID, SETTINGS, reached, run_swarm

CELL_VALUES = 64
PEERS = 24
LAYOUT = Layout(names=("w",), shapes=((4 * CELL_VALUES,),))
ROUND = 72  # messages that a round of three peers has, some more


def a_group(members):
    return Group(
        epoch=1,
        position=2,
        term=0,
        members=tuple(
            Member(
                peer_id=f"peer{i}",
                incarnation="a",
                weight=1.0,
                clip=1.0,
                norm=0.5 + i,
                tokens=1280,
                steps=10,
                loss=2.0,
            )
            for i in range(members)
        ),
        parts=(PartPlan(start_cell=0, stop_cell=4, owner=0),),
        stall_s=1.5,
        deadline_s=60.0,
    )


def test_a_group_travels_in_half_its_bytes():
    group = a_group(1000)
    record = group.encode()
    assert Group.decode(inflated(deflated(record), Group.max_bytes)) == group
    assert len(deflated(record)) < len(record) / 2


def behind_empty_blocks(record):
    """Deflated so that it begins beyond the bytes in which a receiver looks for its head."""
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(record) + packer.flush()
    empty = b"\x00\x00\x00\xff\xff"
    return b"\x78\x01" + 300 * empty + packed + zlib.adler32(record).to_bytes(4, "big")


def test_empty_blocks_before_a_group_are_deflate():
    record = a_group(2).encode()
    assert inflated(behind_empty_blocks(record), Group.max_bytes) == record


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no deflated bytes",
        deflated(a_group(2).encode())[:-1],
        deflated(a_group(2).encode()) + b"x",
        zlib.compress(bytes(64 * MAX_GROUP_BYTES)),
        zlib.compress(b"no record"),
        behind_empty_blocks(a_group(2).encode()),  # members that pass it on would be blamed
    ],
    ids=["empty", "plain", "cut", "more", "bomb", "garbage", "late head"],
)
def test_what_is_no_deflated_group_is_refused(data):
    with pytest.raises(MalformedRecord):
        group_of(Closed(group=data, signature=bytes(64), tell=()))


def run(tmp_path, monkeypatch, scenario):
    use_cells(monkeypatch, CELL_VALUES)
    run_swarm(tmp_path, scenario, layout=LAYOUT)


def everyone_counts(peer, position):
    entry = peer.settled[position].applied.entry
    return len(entry.complete_members()) == len(entry.members) == PEERS


def test_nobody_sends_a_group_to_more_than_eight_and_all_take_part(tmp_path, monkeypatch):
    async def scenario(swarm):
        sent = Counter()

        def count(src, dst, method, number):
            sent[src] += method == "group"

        swarm.network.on_message = count
        peers = await swarm.start(PEERS)
        await swarm.until(lambda: reached(peers, 1))
        assert everyone_counts(peers[0], 0)
        assert sum(sent.values()) == 2 * (PEERS - 1 - dissemination.FAN_OUT)  # calls and answers
        assert max(sent.values()) <= dissemination.FAN_OUT + 1

    run(tmp_path, monkeypatch, scenario)


@pytest.mark.parametrize(
    ("blow", "end"),
    [
        ("freeze", 1),
        pytest.param("kill", 0, marks=pytest.mark.exhaustive),
        pytest.param("kill", 1, marks=pytest.mark.exhaustive),
        pytest.param("freeze", 0, marks=pytest.mark.exhaustive),
    ],
)
def test_who_is_to_pass_a_group_on_and_cannot_costs_the_round_little(
    tmp_path, monkeypatch, blow, end
):
    async def scenario(swarm):
        struck = []

        def strike(src, dst, method, number):
            if method == "group" and not struck:
                struck.append((src, dst)[end])
                getattr(swarm.network, blow)(struck[0])
                return False
            return None

        peers = await swarm.start(PEERS)
        await swarm.until(lambda: reached(peers, 1))
        swarm.network.on_message = strike
        await swarm.until(lambda: bool(struck))
        began_s = swarm.now()
        others = [peer for peer in peers if peer.identity.peer_id not in struck]
        position = max(peer.replica.position for peer in peers)
        await swarm.until(lambda: reached(others, position + 1))
        assert swarm.now() - began_s <= {"kill": 1.0, "freeze": 3.0}[blow]
        entry = others[0].settled[position].applied.entry
        assert {p.ctx.me for p in others} <= {m.elector for m in entry.complete_members()}

    run(tmp_path, monkeypatch, scenario)


def test_a_member_that_withholds_groups_costs_its_branch_half_a_stall(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(PEERS)
        await swarm.until(lambda: reached(peers, 1))
        keeps = set()

        def keep(src, dst, method, number):
            if method == "group" and (not keeps or src in keeps):
                keeps.add(src)
                return False
            return None

        swarm.network.on_message = keep
        await swarm.until(lambda: bool(keeps))
        began_s = swarm.now()
        await swarm.until(lambda: reached(peers, 2))
        assert swarm.now() - began_s < SETTINGS.stall_s / 2 + 0.5
        assert everyone_counts(peers[0], 1)

    run(tmp_path, monkeypatch, scenario)


def test_a_group_without_the_leaders_signature_is_refused(tmp_path, monkeypatch):
    async def scenario(swarm):
        peers = await swarm.start(PEERS)
        await swarm.until(lambda: reached(peers, 1))
        forger, victim = peers[0], peers[1]
        forger.window_s = 60.0
        await swarm.until(lambda: len(victim.ctx.seats) == 1)
        (epoch, position, term), _ = next(iter(victim.ctx.seats.items()))
        fields = {"epoch": epoch, "position": position, "term": term}
        group = a_group(2).model_copy(update=fields)
        signature = forger.identity.sign(group_payload(RUN_ID, group.digest))
        closed = Closed(group=deflated(group.encode()), signature=signature, tell=())
        call = forger.transport.call
        with pytest.raises(Refused, match="signature") as refusal:
            await call(victim.identity.peer_id, "group", closed.encode(), timeout_s=2.0)
        assert refusal.value.code == RefusalCode.OTHER_GROUP
        await swarm.until(lambda: reached(peers, position + 1))
        assert swarm.same_bits(peers)

    run(tmp_path, monkeypatch, scenario)


@pytest.mark.parametrize("message", range(1, ROUND, 18))
def test_a_fault_at_one_of_eighteen_messages_of_a_disseminated_group(
    tmp_path, monkeypatch, message
):
    chain(tmp_path, monkeypatch, message, *KINDS[message % len(KINDS)])


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "end"), KINDS)
def test_a_fault_at_every_message_where_groups_go_from_one_to_the_next(
    tmp_path, monkeypatch, kind, end
):
    for message in range(1, ROUND):
        chain(tmp_path / str(message), monkeypatch, message, kind, end)


def chain(folder, monkeypatch, message, kind, end):
    """The leader tells one, who tells the other; a cut between these two costs both times."""
    monkeypatch.setattr(dissemination, "FAN_OUT", 1)
    cut_s = strikes.COMMIT_S["cut"] + PATIENCE_STALLS * SETTINGS.stall_s
    monkeypatch.setitem(strikes.COMMIT_S, "cut", cut_s)
    assert run_strike(folder, 3, lambda swarm: Strike(swarm, kind, message, end)) is not None
