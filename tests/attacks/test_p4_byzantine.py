"""P4 in a run that withstands liars: one keeper of four lies, and no position is decided twice."""

import asyncio

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused, TransportError
from atoll.optim.log.electorate import succeed
from atoll.optim.log.entry import (
    Certificate,
    Entry,
    StateRoot,
    Vote,
    check_certificate,
    commit_payload,
    is_quorum,
    proposal_payload,
    vote_payload,
)
from atoll.optim.log.locks import Lock
from atoll.peer.rounds.consensus.ballots import Accepted, leader_of, term_of
from atoll.peer.rounds.consensus.polls import Polls
from atoll.peer.rounds.consensus.round_events import SendLock, SendProposal
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.messages import (
    Announced,
    AskCommit,
    Ballot,
    JustifiedPropose,
    deflated,
)
from support.swarm import reached, run_swarm


def run(folder, scenario):
    run_swarm(folder, scenario, electors="keepers", trust="byzantine")


async def begin(swarm, *, keepers=4, trainers=3):
    voting = [swarm.add(role="keeper") for _ in range(keepers)]
    training = [swarm.add() for _ in range(trainers)]
    await swarm.begin([*voting, *training])
    return voting, training


def entries(peer):
    stored = peer.replica.store.headers(0, peer.replica.position)
    return [(Entry.decode(row.entry), Certificate.decode(row.certificate)) for row in stored]


def expect_one_log(peers):
    shortest = min(peer.replica.position for peer in peers)
    logs = {tuple(entry.digest for entry, _ in entries(peer)[:shortest]) for peer in peers}
    assert len(logs) == 1


def test_keepers_commit_what_they_locked(tmp_path):
    async def scenario(swarm):
        keepers, trainers = await begin(swarm)
        began = swarm.now()
        await swarm.until(lambda: reached([*keepers, *trainers], 6))
        assert swarm.now() - began < 6 * 6  # windows of 5 s
        assert swarm.same_bits([*keepers, *trainers])
        replica = keepers[0].replica
        for entry, certificate in entries(keepers[0]):
            assert len(certificate.votes) >= 3
            check_certificate(
                entry, certificate, replica.electorate, keepers[0].ctx.verify, "byzantine"
            )

    run(tmp_path, scenario)


@pytest.mark.parametrize("after", [0, 1])
def test_a_leader_that_is_lost_between_lock_and_commit_leaves_its_entry(
    tmp_path, monkeypatch, after
):
    """Another keeper has the lock when the leader dies, or none: the next leader asks all."""

    async def scenario(swarm):
        keepers, trainers = await begin(swarm)
        await swarm.until(lambda: reached(keepers, 2))
        run_polls, locked = Polls._run, []

        async def dies(polls, question, electorate):
            if locked or not isinstance(question, SendLock):
                return await run_polls(polls, question, electorate)
            locked.extend([polls, question.entry])
            others = [i for i, e in enumerate(electorate) if e != polls._ctx.me]
            for i in others[:after]:
                record = polls._lock_record(question, i)
                await polls._ask_commit(question, i, electorate[i], record, 5.0)
            next(keeper for keeper in keepers if keeper.ctx.me == polls._ctx.me).kill()

        monkeypatch.setattr(Polls, "_run", dies)
        await swarm.until(lambda: bool(locked), timeout_s=300)
        lost, entry = locked[0]._ctx.me, locked[1]
        left = [keeper for keeper in keepers if keeper.ctx.me != lost]
        await swarm.until(lambda: reached([*left, *trainers], entry.position + 4), timeout_s=600)
        decided, certificate = entries(left[0])[entry.position]
        if after:
            assert decided == entry
        assert term_of(certificate.attempt) > 0
        expect_one_log([*left, *trainers])

    run(tmp_path, scenario)


def two_proposals(monkeypatch, liar):
    """At its next attempt the liar proposes twice, locks and commits whatever it can."""
    run_polls, told, certified = Polls._run, [], []

    async def call(polls, peer, method, record, timeout_s=5):
        try:
            return await polls._ctx.transport.call(peer, method, record.encode(), timeout_s=5)
        except TransportError:
            return None

    async def gathered(polls, question, electorate, entry, side):
        me = electorate.index(polls._ctx.me)
        votes = {me: polls._ctx.sign(vote_payload(entry, question.attempt))}
        ask = JustifiedPropose(
            attempt=question.attempt,
            entry=deflated(entry.encode()),
            reports=polls._reports.get(entry.reports, ()),
            signature=polls._ctx.sign(proposal_payload(entry, question.attempt)),
            justification=question.justification,
        )
        for i in side:
            answer = await call(polls, electorate[i].peer_id, "propose", ask)
            if answer is not None:
                votes[i] = Ballot.decode(answer).signature
        return votes

    async def committed(polls, question, electorate, entry, votes, side):
        me = electorate.index(polls._ctx.me)
        commits = {me: polls._ctx.sign(commit_payload(entry, question.attempt))}
        lock = Lock(attempt=question.attempt, votes=as_votes(votes))
        ask = AskCommit(
            epoch=entry.epoch,
            position=entry.position,
            lock=lock,
            entry=deflated(entry.encode()),
            reports=polls._reports.get(entry.reports, ()),
        )
        for i in side:
            answer = await call(polls, electorate[i].peer_id, "lock", ask)
            if answer is not None:
                commits[i] = Ballot.decode(answer).signature
        return commits

    async def lying(polls, question, electorate):
        me = polls._ctx.me
        if me != liar or not isinstance(question, SendProposal) or told:
            return await run_polls(polls, question, electorate)
        told.append(question.entry.position)
        a = question.entry
        lie = a.parts[0].model_copy(update={"generation": a.parts[0].generation + 1})
        b = a.model_copy(update={"parts": (lie, *a.parts[1:])})
        others = [i for i, e in enumerate(electorate) if e != me]
        for entry, side in ((a, others[:2]), (b, others[-2:])):
            votes = await gathered(polls, question, electorate, entry, side)
            commits = await committed(polls, question, electorate, entry, votes, side)
            if is_quorum(list(commits), len(electorate), "byzantine"):
                certified.append(entry)
                certificate = Certificate(attempt=question.attempt, votes=as_votes(commits))
                record = deflated(entry.encode())
                announced = Announced(entry=record, certificate=certificate.encode(), tell=())
                for i in side[:1]:
                    await call(polls, electorate[i].peer_id, "commit", announced)

    monkeypatch.setattr(Polls, "_run", lying)
    return told, certified


def as_votes(signatures):
    return tuple(Vote(elector=i, signature=s) for i, s in sorted(signatures.items()))


@pytest.mark.parametrize(
    ("count", "voices"),
    [
        (4, "lost"),
        (5, "heard"),
        pytest.param(4, "heard", marks=pytest.mark.exhaustive),
        pytest.param(5, "lost", marks=pytest.mark.exhaustive),
    ],
)
def test_a_keeper_that_proposes_two_entries_forks_nothing(tmp_path, monkeypatch, count, voices):
    """Even if no vote reaches another elector; a run of majorities forks there."""

    async def scenario(swarm):
        keepers, trainers = await begin(swarm, keepers=count)
        await swarm.until(lambda: reached(keepers, 2))
        liar, honest = keepers[-1], keepers[:-1]
        if voices == "lost":
            swarm.network.on_message = lambda src, dst, method, n: method != "voted"
        told, certified = two_proposals(monkeypatch, liar.ctx.me)
        await swarm.until(lambda: bool(told), timeout_s=2000)
        began = swarm.now()
        await swarm.until(lambda: reached([*honest, *trainers], told[0] + 4), timeout_s=600)
        assert swarm.now() - began < 120
        assert len(certified) <= 1
        expect_one_log([*honest, *trainers])
        assert swarm.same_bits(honest)
        if voices == "heard":
            name = liar.identity.peer_id
            await swarm.until(lambda: all(p.ctx.conduct.is_out(name) for p in honest))

    run(tmp_path, scenario)


def test_a_keeper_that_votes_and_never_commits_stops_nothing(tmp_path, monkeypatch):
    async def scenario(swarm):
        keepers, trainers = await begin(swarm)
        liar, honest = keepers[0], keepers[1:]
        commit = Voter._commit

        async def mute(voter, remote, ask):
            if voter._ctx.me == liar.ctx.me:
                raise Refused(RefusalCode.SUPERSEDED, "never")
            return await commit(voter, remote, ask)

        monkeypatch.setattr(Voter, "_commit", mute)
        began = swarm.now()
        await swarm.until(lambda: reached([*honest, *trainers], 8))
        assert swarm.now() - began < 8 * 8
        expect_one_log([*honest, *trainers])

    run(tmp_path, scenario)


def test_a_proposal_without_promises_gets_no_vote(tmp_path, monkeypatch):
    """The liar leads a second term, and leaves out the promises that it was given."""

    async def scenario(swarm):
        keepers, trainers = await begin(swarm)
        await swarm.until(lambda: reached(keepers, 2))
        ask, refused = Polls._proposal, []
        liar = []

        def bare(polls, question):
            proposal = ask(polls, question)
            if question.attempt and (not liar or liar[0] == polls._ctx.me):
                liar[:] = [polls._ctx.me]
                refused.append(question.attempt)
                empty = type(question.justification)()
                return proposal.model_copy(update={"justification": empty})
            return proposal

        def lost(src, dst, method, n):
            first = leader_of(keepers[0].replica.electorate, keepers[0].replica.position, 0)
            return not (method == "propose" and src == first.peer_id and not refused)

        monkeypatch.setattr(Polls, "_proposal", bare)
        swarm.network.on_message = lost
        await swarm.until(lambda: bool(refused), timeout_s=600)
        at = keepers[0].replica.position
        honest = [k for k in keepers if k.ctx.me != liar[0]]
        await swarm.until(lambda: reached([*honest, *trainers], at + 2), timeout_s=600)
        assert all(c.attempt not in refused for _, c in entries(honest[0])[at : at + 1])
        expect_one_log([*honest, *trainers])

    run(tmp_path, scenario)


def null_entry(ctx, position, last):
    """Return the NULL entry that anybody may propose next, made of the last entry."""
    fragment, root = ctx.replay.fragment_at(position), ctx.replica.root_due(position)
    voters = succeed(
        ctx.replica.voters,
        position=position,
        fragment=fragment,
        members=(),
        parts=(),
        dropped=frozenset(),
        electors="keepers",
    )
    changes = {
        "kind": "null",
        "position": position,
        "previous_chain": ctx.replica.chain,
        "fragment": fragment,
        "members": (),
        "parts": (),
        "reports": b"",
        "electorate": voters.electorate,
        "newcomers": voters.newcomers,
        "norms": voters.norms,
        "state_root": StateRoot(position=root[0], root=root[1]) if root else None,
    }
    return last.model_copy(update=changes)


def test_a_promise_with_a_lock_that_nobody_voted_for_counts_for_nothing(tmp_path, monkeypatch):
    """Leaders that took its entry would propose what no honest keeper votes for."""

    async def scenario(swarm):
        keepers, trainers = await begin(swarm)
        await swarm.until(lambda: reached(keepers, 2))
        liar, honest = keepers[0], keepers[1:]
        at, lies = keepers[1].replica.position, []
        promise = Voter._locked_promise

        def lying(voter, ask, locked):
            if voter._ctx.me != liar.ctx.me or ask.attempt == 0:
                return promise(voter, ask, locked)
            entry = null_entry(voter._ctx, ask.position, entries(liar)[-1][0])
            lock = Lock(attempt=ask.attempt - 1, votes=())
            lies.append(ask.attempt)
            forged = Accepted(attempt=lock.attempt, entry=entry.encode(), lock=lock)
            return promise(voter, ask, forged)

        def lost(src, dst, method, n):
            leader = leader_of(honest[0].replica.electorate, at, 0)
            return not (method == "propose" and src == leader.peer_id and not lies)

        blamed = []

        def blame(peer, why, now):
            blamed.append(peer)

        for peer in honest:
            monkeypatch.setattr(peer.ctx.conduct, "fault", blame)
        monkeypatch.setattr(Voter, "_locked_promise", lying)
        swarm.network.on_message = lost
        await swarm.until(lambda: bool(lies), timeout_s=600)
        await swarm.until(lambda: reached([*honest, *trainers], at + 3), timeout_s=600)
        expect_one_log([*honest, *trainers])
        assert set(blamed) <= {liar.identity.peer_id}, "a leader proposed the entry of the lie"

    run(tmp_path, scenario)


def test_a_lock_without_the_reports_of_its_entry_is_not_committed(tmp_path, monkeypatch):
    """The next leader would get them with the keeper's promise, and could not propose the entry."""

    async def scenario(swarm):
        await begin(swarm)
        commits, answers = Polls._ask_commit, []

        async def bare(polls, question, index, elector, record, timeout_s):
            entry = question.entry
            if not answers and entry.kind == "update" and elector != polls._ctx.me:
                place = {"epoch": entry.epoch, "position": entry.position, "lock": question.lock}
                ask = AskCommit(**place, entry=deflated(entry.encode()), reports=())
                answers.append("")
                with pytest.raises(TransportError) as refusal:
                    await polls._ctx.transport.call(
                        elector.peer_id, "lock", ask.encode(), timeout_s=5
                    )
                answers.append(str(refusal.value))
            return await commits(polls, question, index, elector, record, timeout_s)

        monkeypatch.setattr(Polls, "_ask_commit", bare)
        await swarm.until(lambda: len(answers) > 1, timeout_s=60)
        assert "expected the reports that it names" in answers[1]

    run(tmp_path, scenario)


def test_a_keeper_that_is_locked_names_its_lock_in_promises(tmp_path, monkeypatch):
    async def scenario(swarm):
        keepers, trainers = await begin(swarm)
        await swarm.until(lambda: reached(keepers, 2))
        commits, promises = Polls._ask_commit, []
        promised = Voter._locked_promise

        async def lost(polls, question, index, elector, record, timeout_s):
            if promises or elector == polls._ctx.me:
                return await commits(polls, question, index, elector, record, timeout_s)
            await asyncio.sleep(0)

        def noted(voter, ask, locked):
            promises.append(locked)
            return promised(voter, ask, locked)

        monkeypatch.setattr(Polls, "_ask_commit", lost)
        monkeypatch.setattr(Voter, "_locked_promise", noted)
        await swarm.until(lambda: any(promises), timeout_s=600)
        at = keepers[0].replica.position
        locked = next(filter(None, promises))
        await swarm.until(lambda: reached([*keepers, *trainers], at + 2), timeout_s=600)
        assert entries(keepers[0])[at][0].encode() == locked.entry
        expect_one_log([*keepers, *trainers])

    run(tmp_path, scenario)
