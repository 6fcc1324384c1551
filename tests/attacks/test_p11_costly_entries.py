"""P11: entries that are small on the wire and take seconds to inflate and parse."""

import asyncio

import msgpack
import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.optim.log.entry import (
    MAX_MEMBERS,
    Certificate,
    Elector,
    Entry,
    MalformedRecord,
    Vote,
    check_certificate,
    proposal_payload,
    vote_payload,
)
from atoll.optim.log.locks import Lock
from atoll.peer.rounds import entries
from atoll.peer.rounds.conduct import MAX_FAULTS, Fault
from atoll.peer.rounds.consensus import dissemination
from atoll.peer.rounds.consensus.ballots import leader_of
from atoll.peer.rounds.consensus.dissemination import Seat
from atoll.peer.rounds.entries import LOOP_BYTES
from atoll.peer.rounds.messages import (
    Announced,
    AskCommit,
    Closed,
    EntryHead,
    Group,
    Prepare,
    Propose,
    Voted,
    deflated,
    entry_head,
)
from support.greedy import costly
from support.swarm import run_swarm


@pytest.fixture
def work(monkeypatch):
    """Count what is inflated and parsed of entries and groups above 64 kB."""
    done = []

    def counted(what, function, size):
        def count(*args):
            result = function(*args)
            if size(args, result) > LOOP_BYTES:
                done.append(what)
            return result

        return count

    def inflating(args, result):
        return len(result)

    for module in (entries, dissemination):
        counting = counted("inflated", module.inflated, inflating)
        monkeypatch.setattr(module, "inflated", counting)
    parsing = counted("parsed", Entry.decode, lambda args, result: len(args[0]))
    monkeypatch.setattr(Entry, "decode", parsing)
    return done


def attacked(tmp_path, attack, **options):
    """Run an attack of a stranger on one of three peers, at a position at which nothing happens."""

    async def scenario(swarm):
        peers = await swarm.start(3, window_s=1000.0)
        await swarm.until(lambda: all(p.replica.ready and p.replica.electorate for p in peers))
        leader = leader_of(peers[0].replica.electorate, 0, 0)
        victim = next(p for p in peers if p.ctx.me != leader)
        await attack(swarm, peers, victim)

    run_swarm(tmp_path, scenario, codec="int8", **options)


async def refusal_of(calling):
    with pytest.raises(Refused) as refusal:
        await calling
    return refusal.value.code


def test_a_proposal_is_not_inflated_unless_its_leader_sends_it(tmp_path, work):
    async def attack(swarm, peers, victim):
        stranger = swarm.network.transport("stranger")
        leader = leader_of(victim.replica.electorate, 0, 0)
        elector = next(p for p in peers if p is not victim and p.ctx.me != leader)
        here, far = (deflated(costly(victim.replica, position=at)) for at in (0, 10**6))
        for sender in (stranger, elector.transport):
            for entry, code in (
                (here, RefusalCode.NOT_THE_LEADER),
                (far, RefusalCode.ELSEWHERE),
            ):
                ask = Propose(attempt=0, entry=entry, signature=bytes(64)).encode()
                call = sender.call(victim.identity.peer_id, "propose", ask, timeout_s=30)
                assert await refusal_of(call) is code
        assert work == []

    attacked(tmp_path, attack)


def test_a_proposal_of_another_branch_is_not_inflated(tmp_path, work):
    async def attack(swarm, peers, victim):
        leader = leader_of(victim.replica.electorate, 0, 0).peer_id
        entry = deflated(costly(victim.replica, previous_chain=bytes(32)))
        ask = Propose(attempt=0, entry=entry, signature=bytes(64)).encode()
        for _ in range(MAX_FAULTS + 1):  # no fault: the other branch may be the right one
            call = victim.rounds.voter.answer(leader, "propose", ask)
            assert await refusal_of(call) is RefusalCode.ELSEWHERE
        assert work == []

    attacked(tmp_path, attack)


def test_a_lock_is_not_inflated_unless_an_elector_sends_it(tmp_path, work):
    async def attack(swarm, peers, victim):
        stranger = swarm.network.transport("stranger")
        leader = leader_of(victim.replica.electorate, 0, 0)
        elector = next(p for p in peers if p is not victim and p.ctx.me != leader)
        ask = AskCommit(
            epoch=victim.replica.epoch,
            position=0,
            lock=Lock(attempt=0, votes=()),
            entry=deflated(costly(victim.replica)),
        ).encode()
        for sender in (stranger, elector.transport):
            call = sender.call(victim.identity.peer_id, "lock", ask, timeout_s=30)
            assert await refusal_of(call) is RefusalCode.NOT_THE_LEADER
        ask = msgpack.packb({"epoch": 1, "position": 0, "lock": [0] * (1 << 16)})
        call = stranger.call(victim.identity.peer_id, "lock", ask, timeout_s=30)
        assert await refusal_of(call) is RefusalCode.NOT_THE_LEADER
        assert work == []

    attacked(tmp_path, attack, trust="byzantine")


def test_a_decided_entry_is_not_parsed_before_its_certificate_holds(tmp_path, work):
    async def attack(swarm, peers, victim):
        stranger = swarm.network.transport("stranger")
        votes = tuple(Vote(elector=index, signature=bytes(64)) for index in range(2))
        forged = Certificate(attempt=0, votes=votes).encode()
        here, far = (deflated(costly(victim.replica, position=at)) for at in (0, 10**6))
        name = victim.identity.peer_id

        async def tell(entry):
            said = Announced(entry=entry, certificate=forged, tell=()).encode()
            return await refusal_of(stranger.call(name, "commit", said, timeout_s=30))

        assert await tell(far) is RefusalCode.ELSEWHERE
        assert work == []
        for _ in range(MAX_FAULTS):
            assert await tell(here) is RefusalCode.BAD_MESSAGE
        assert work == ["inflated"] * MAX_FAULTS
        assert await tell(here) is RefusalCode.BARRED
        assert work == ["inflated"] * MAX_FAULTS

    attacked(tmp_path, attack)


def test_a_group_that_nobody_waits_for_is_not_inflated(tmp_path, work):
    async def attack(swarm, peers, victim):
        stranger = swarm.network.transport("stranger")
        record = msgpack.packb({"epoch": 1, "position": 0, "term": 9, "members": [0] * (1 << 17)})
        closed = Closed(group=deflated(record), signature=bytes(64), tell=()).encode()
        call = stranger.call(victim.identity.peer_id, "group", closed, timeout_s=30)
        assert await refusal_of(call) is RefusalCode.NO_SEAT
        assert work == []

    attacked(tmp_path, attack)


def test_a_group_that_has_begun_is_not_parsed_again(tmp_path, monkeypatch):
    """Anyone may repeat what its leader signed; one of 4,096 members takes 0.1 s to parse."""
    take, decode, parsed = Seat.take, Group.decode, []

    async def scenario(swarm):
        victim, other, _ = await swarm.start(3)
        name, repeats = victim.identity.peer_id, []

        def taken(seat, closed, group, *, passed):
            take(seat, closed, group, passed=passed)
            if seat._ctx.me == victim.ctx.me and not repeats:
                monkeypatch.setattr(Group, "decode", lambda data: parsed.append(1) or decode(data))
                for _ in range(3):
                    call = other.transport.call(name, "group", closed.encode(), timeout_s=1.0)
                    repeats.append(asyncio.create_task(call))

        monkeypatch.setattr(Seat, "take", taken)
        await swarm.until(lambda: repeats and all(call.done() for call in repeats))
        assert [call.result() for call in repeats] == [b""] * 3
        assert len(parsed) <= 2  # by the two others, with the leader

    run_swarm(tmp_path, scenario, codec="int8")


@pytest.mark.parametrize("method", ["prepare", "propose", "commit", "group", "seals"])
def test_a_barred_peer_is_refused_before_its_call_is_read(tmp_path, method):
    async def attack(swarm, peers, victim):
        stranger = swarm.network.transport("stranger")
        for _ in range(MAX_FAULTS):
            victim.ctx.fault("stranger", Fault.BAD_PROPOSAL)
        call = stranger.call(victim.identity.peer_id, method, b"rubbish", timeout_s=30)
        assert await refusal_of(call) is RefusalCode.BARRED

    attacked(tmp_path, attack)


def test_an_entry_above_64_kb_is_opened_off_the_loop(tmp_path):
    async def attack(swarm, peers, victim):
        leader = leader_of(victim.replica.electorate, 0, 0).peer_id
        sign = next(p for p in peers if p.identity.peer_id == leader).identity.sign
        inline, offloaded = victim.ctx.compute, []

        async def compute(function, *args):
            offloaded.extend(len(arg) for arg in args if isinstance(arg, bytes))
            return await inline(function, *args)

        victim.ctx.compute = compute
        record = costly(victim.replica)
        signature = sign(proposal_payload(Entry.decode(record), 0))
        ask = Propose(attempt=0, entry=deflated(record), signature=signature).encode()
        call = victim.rounds.voter.answer(leader, "propose", ask)
        assert (await refusal_of(call)).startswith("bad-")
        assert offloaded[:2] == [len(deflated(record)), len(record)]

    attacked(tmp_path, attack)


def test_a_head_is_that_of_its_entry(tmp_path):
    async def attack(swarm, peers, victim):
        record = costly(victim.replica, position=2**62, epoch=2**62)
        entry, head = Entry.decode(record), entry_head(deflated(record))
        assert head.model_dump() == {name: getattr(entry, name) for name in EntryHead.model_fields}
        _, name = await entries.named(victim.ctx.compute, deflated(record))
        assert vote_payload(name, 3) == vote_payload(entry, 3)
        signers = [p.identity for p in peers]
        order = [e.peer_id for e in victim.replica.electorate]
        votes = tuple(
            Vote(elector=order.index(who.peer_id), signature=who.sign(vote_payload(entry, 3)))
            for who in signers
        )
        certificate = Certificate(attempt=3, votes=votes)
        check_certificate(name, certificate, victim.replica.electorate, victim.ctx.verify)

    attacked(tmp_path, attack)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"no map",
        msgpack.packb({"position": 1}),
        msgpack.packb({"version": 5, "run_id": [0] * 100}),
        msgpack.packb({"version": 5, "run_id": {"a": 1}}),
        msgpack.packb({"version": 5, "run_id": b"r" * 10_000}),
    ],
)
def test_a_head_of_anything_else_is_refused(head):
    with pytest.raises(MalformedRecord):
        entry_head(deflated(head))
    with pytest.raises(MalformedRecord):
        entry_head(head)


class TestBounds:
    def test_a_map_of_many_keys_is_refused_before_its_keys_are_read(self):
        with pytest.raises(MalformedRecord, match="max_map_len"):
            Entry.decode(msgpack.packb({str(key): 0 for key in range(33)}))

    def test_a_long_list_is_refused_before_its_items_are_read(self):
        with pytest.raises(MalformedRecord, match="max_array_len"):
            Entry.decode(msgpack.packb([0] * ((1 << 16) + 1)))

    def test_more_members_than_a_group_may_have_are_refused(self):
        with pytest.raises(MalformedRecord, match="at most 4096"):
            Entry.decode(costly(Place, members=MAX_MEMBERS + 1))

    @pytest.mark.parametrize("kind", [Prepare, Voted])
    def test_small_messages_are_small(self, kind):
        with pytest.raises(MalformedRecord, match="at most 4096 bytes"):
            kind.decode(bytes(4097))


class Place:
    """Stands where a replica would."""

    run_id, chain, epoch = bytes(32), bytes(32), 0
    electorate = (Elector(peer_id="a", incarnation="1"),)
