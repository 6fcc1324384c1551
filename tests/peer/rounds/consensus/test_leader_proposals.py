"""An entry is proposed before its bytes are everywhere, and its votes go to all electors."""

import asyncio

import msgpack
import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.testing.memory import run_virtual
from atoll.dht.transport import Refused
from atoll.optim.log.entry import Certificate, Elector, Entry
from atoll.optim.log.evidence import EvidenceBook
from atoll.peer.rounds.conduct import Fault
from atoll.peer.rounds.consensus import leader as leaders
from atoll.peer.rounds.consensus import polls
from atoll.peer.rounds.consensus import voter as voters
from atoll.peer.rounds.consensus.ballots import TERM, leader_of
from atoll.peer.rounds.consensus.voter import MAX_ELECTORS, Voter, VoteTally
from atoll.peer.rounds.messages import Voted, inflated
from support.strikes import expect_no_work_lost, expect_sums, passed
from support.swarm import SETTINGS, run_swarm


def leader_at(peers, position):
    name = leader_of([p.ctx.me for p in peers], position, 0).peer_id
    return next(p for p in peers if p.identity.peer_id == name)


def rows(peer):
    return peer.replica.store.headers(0, peer.replica.position)


def test_a_leader_without_the_state_whose_root_is_due_leads_all_the_same(tmp_path):
    """As one that was started again: it votes for its entry, which then binds the others."""

    async def scenario(swarm):
        peers = await swarm.start(3, window_s=1.0)
        due_at = 4
        await swarm.until(lambda: passed(peers, due_at - 2))
        await swarm.until(lambda: all(due_at - 2 in p.replica.snapshots for p in peers))
        del leader_at(peers, due_at).replica.snapshots[due_at - 2]
        await swarm.until(lambda: passed(peers, due_at + 2))
        row = rows(peers[0])[due_at]
        assert Entry.decode(row.entry).state_root is None
        assert Certificate.decode(row.certificate).attempt == 0
        assert Entry.decode(rows(peers[0])[due_at + 2].entry).state_root is not None
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario)


@pytest.mark.parametrize("lacking", ["keep_reports", "keep_group"])
def test_a_proposal_is_whole_for_those_that_lack_its_group(tmp_path, monkeypatch, lacking):
    asked = []
    vote = Voter._propose

    async def propose(voter, remote, ask, reason):
        entry = msgpack.unpackb(inflated(ask.entry, Entry.max_bytes))
        is_whole = bool(ask.reports), bool(entry["members"]), not ask.group
        assert len(set(is_whole)) == 1
        asked.append((voter._ctx.me.peer_id, is_whole[0]))
        return await vote(voter, remote, ask, reason)

    monkeypatch.setattr(Voter, "_propose", propose)

    async def scenario(swarm):
        peers = await swarm.start(3, window_s=1.0)
        await swarm.until(lambda: passed(peers, 2))
        other, without, at = peers[0], peers[1], peers[0].replica.position
        asked.clear()
        setattr(without.ctx.parts, lacking, lambda *_: None)
        await swarm.until(lambda: passed(peers, at + 4))
        assert {brief for peer, brief in asked if peer == other.identity.peer_id} == {False}
        whole = [brief for peer, brief in asked if peer == without.identity.peer_id]
        assert whole[:4] == [False, True] * 2
        assert all(Certificate.decode(row.certificate).attempt == 0 for row in rows(peers[0]))
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario)


def test_electors_need_no_commit(tmp_path):
    async def scenario(swarm):
        swarm.network.on_message = lambda src, dst, method, n: method != "commit"
        peers = await swarm.start(4, window_s=1.0)
        await swarm.until(lambda: passed(peers, 4), timeout_s=60.0)
        assert all(Certificate.decode(row.certificate).attempt == 0 for row in rows(peers[0]))
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario)


def test_what_was_voted_for_is_decided_without_the_leader(tmp_path):
    """It dies at the first vote that an elector tells another."""

    async def scenario(swarm):
        peers = await swarm.start(4, window_s=1.0)
        await swarm.until(lambda: passed(peers, 2))
        position = peers[0].replica.position
        leader, struck_at = leader_at(peers, position), []

        def strike(src, dst, method, n):
            if method == "voted" and not struck_at:
                struck_at.append(swarm.now())
                leader.kill()

        swarm.network.on_message = strike
        rest = [p for p in peers if p is not leader]
        await swarm.until(lambda: passed(rest, position))
        # Ten messages, one after the other, or more: the elector that leads the next term may have
        # asked for promises by then, and hears of the decision by its refusals. No stall passes.
        assert swarm.now() < struck_at[0] + SETTINGS.stall_s / 2
        entry = Entry.decode(rows(rest[0])[position].entry)
        assert leader.ctx.me in {member.elector for member in entry.complete_members()}
        await swarm.until(lambda: passed(rest, position + 2))
        assert swarm.same_bits(rest)

    run_swarm(tmp_path, scenario)


def test_the_leader_has_a_part_reduced_again_if_it_is_lost_after_proposing(tmp_path):
    """Its owner dies with the last cells on their way: nobody can vote for that entry."""

    async def scenario(swarm):
        peers = await swarm.start(4, window_s=1.0, link_mbit_s=8.0, declared_mbit_s=8.0)
        await swarm.until(lambda: passed(peers, 2))
        position = peers[0].replica.position
        leader = leader_at(peers, position)
        last = Entry.decode(rows(leader)[-1].entry)
        large = {last.members[part.owner].elector for part in last.parts if part.stop_cell < 4}
        owner = next(p for p in peers if p is not leader and p.ctx.me in large)

        def strike(src, dst, method, n):
            if method == "propose" and owner.transport.alive:
                owner.kill()

        swarm.network.on_message = strike
        rest = [p for p in peers if p is not owner]
        await swarm.until(lambda: passed(rest, position))
        row = rows(rest[0])[position]
        attempt = Certificate.decode(row.certificate).attempt
        assert 0 < attempt < TERM
        entry = Entry.decode(row.entry)
        assert any(part.generation for part in entry.parts)
        assert {p.ctx.me for p in rest} <= {m.elector for m in entry.complete_members()}
        await swarm.until(lambda: passed(rest, position + 1))
        assert swarm.same_bits(rest)
        expect_sums(swarm, rest[0])
        for peer in rest:
            expect_no_work_lost(peer)

    run_swarm(tmp_path, scenario)


def electors(count):
    return [Elector(peer_id=f"p{i}", incarnation="0") for i in range(count)]


def entry_for(electorate):
    return Entry(
        run_id=bytes(32),
        epoch=1,
        position=0,
        kind="null",
        previous_chain=bytes(32),
        fragment=0,
        lr=1.0,
        momentum=0.0,
        members=(),
        parts=(),
        electorate=tuple(electorate),
    )


class FakeContext:
    """What a tally needs of a peer; signatures are the signer's name."""

    def __init__(self, me):
        self.me, self.faults, self.told = me, [], []
        self.evidence, self.accused = EvidenceBook(), []
        self.transport = self

        class Settings:
            stall_s = 1.5

        self.settings = Settings()

    async def call(self, peer, method, body, *, timeout_s):
        self.told.append(peer)
        return b""

    def verify(self, peer, payload, signature):
        return signature == peer.encode().ljust(64)

    def fault(self, peer, why):
        self.faults.append((peer, why))

    def accuse(self, evidence):
        self.accused.append((evidence.peer_id, evidence.kind))


def vote_of(elector, entry, attempt=0):
    return Voted(
        epoch=1,
        position=0,
        attempt=attempt,
        entry=entry.digest,
        signature=elector.peer_id.encode().ljust(64),
        proposal=bytes(64),
    )


def test_a_tally_takes_a_quorum_of_valid_votes_for_what_it_voted_for(tmp_path):
    async def main():
        everyone = electors(5)
        ctx, certified = FakeContext(everyone[1]), []
        tally = VoteTally(ctx, lambda entry, certificate: certified.append(certificate))
        tally.turn(everyone)
        entry = entry_for(everyone)
        other = entry.model_copy(update={"lr": 2.0})
        tally.take("p2", vote_of(everyone[2], entry))
        tally.take("p3", vote_of(everyone[3], other))
        with pytest.raises(Refused, match="elector"):
            tally.take("stranger", vote_of(everyone[3], entry))
        tally.vote(entry, vote_of(everyone[1], entry), "p0")
        tally.take("p4", vote_of(everyone[3], entry))  # signed by somebody else
        assert not certified
        assert ctx.faults == [("p4", Fault.BAD_VOTE)]
        tally.take("p0", vote_of(everyone[0], entry, attempt=1))
        assert not certified
        tally.take("p4", vote_of(everyone[4], entry))
        assert [vote.elector for vote in certified[0].votes] == [1, 2, 4]
        tally.take("p3", vote_of(everyone[3], entry))
        assert len(certified) == 1
        assert ctx.accused == [("p3", "vote")]  # for another entry before
        await tally.close()

    run_virtual(main())


def test_large_electorates_leave_the_certificate_to_the_leader():
    async def main():
        everyone = electors(MAX_ELECTORS + 1)
        ctx = FakeContext(everyone[1])
        tally = VoteTally(ctx, lambda entry, certificate: None)
        tally.turn(everyone)
        entry = entry_for(everyone)
        tally.vote(entry, vote_of(everyone[1], entry), "p0")
        await asyncio.sleep(1.0)  # else closing would end what it sends
        await tally.close()
        assert ctx.told == []

    run_virtual(main())


def test_a_tally_counts_where_the_electorate_is_known_later(tmp_path):
    """A question may come while a replica recovers, at the position that it recovers to."""

    async def main():
        everyone, certified = electors(2), []
        ctx = FakeContext(everyone[1])
        tally = VoteTally(ctx, lambda entry, certificate: certified.append(certificate))
        tally.turn(())
        tally.know(everyone)
        entry = entry_for(everyone)
        tally.vote(entry, vote_of(everyone[1], entry), "p0")
        tally.take("p0", vote_of(everyone[0], entry))
        await tally.close()
        assert len(certified) == 1

    run_virtual(main())


def test_an_elector_that_its_leader_alone_misses_votes_on(tmp_path, monkeypatch):
    """It cannot vote yet, so that the other two are needed, and one of them hears it."""
    prepare, propose = Voter._prepare, Voter._propose

    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: passed(peers, 2))
        at = max(p.replica.position for p in peers) + 1
        leader = leader_at(peers, at)
        missed = next(p for p in peers if p is not leader)

        def behind(answer):
            async def answered(voter, *asked):
                if voter._ctx is missed.ctx and missed.replica.position == at:
                    raise Refused(RefusalCode.ELSEWHERE, "not there yet")
                return await answer(voter, *asked)

            return answered

        monkeypatch.setattr(Voter, "_prepare", behind(prepare))
        monkeypatch.setattr(Voter, "_propose", behind(propose))
        asked = miss(monkeypatch, leader.ctx, missed.ctx.me)
        await swarm.until(lambda: passed(peers, at))
        row = rows(leader)[at]
        assert Certificate.decode(row.certificate).attempt == 0
        assert missed.ctx.me in Entry.decode(row.entry).electorate
        assert asked  # it was, in vain

    run_swarm(tmp_path, scenario)


def miss(monkeypatch, ctx, missed):
    """One leader and its acceptor hear nothing of another elector, session or not."""
    init, ask, asked = leaders.Round.__init__, leaders.ask_head, []

    def deaf(machine, *args, leads, **options):
        init(machine, *args, leads=leads, **options)
        if leads._me == ctx.me:
            is_live = machine.is_live
            machine.is_live = lambda peer: peer != missed.peer_id and is_live(peer)

    async def ask_deaf(asking, peer, *stalls):
        if asking is ctx and peer == missed.peer_id:
            asked.append(peer)
            return None
        return await ask(asking, peer, *stalls)

    monkeypatch.setattr(leaders.Round, "__init__", deaf)
    for module in (leaders, polls, voters):
        monkeypatch.setattr(module, "ask_head", ask_deaf)
    return asked
