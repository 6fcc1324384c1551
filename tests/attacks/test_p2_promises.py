"""P2 by promises: an acceptor names entries that no leader could propose."""

import asyncio

import pytest

from atoll.optim.log.electorate import succeed
from atoll.optim.log.entry import Entry, Part, sha256
from atoll.peer.rounds.consensus.ballots import term_of
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.messages import Promise, Ready, Sworn, deflated, reports_root
from atoll.peer.rounds.policies import admit
from support.attackers import stop_at
from support.swarm import SETTINGS, SMALL, reached, ready_of, run_swarm


def noise(liar, ask):
    return Promise(attempt=ask.attempt, accepted_attempt=0, entry=deflated(b"noise" * 40))


def bomb(liar, ask):
    return Promise(attempt=ask.attempt, accepted_attempt=0, entry=deflated(b"\0" * (16 << 20)))


def of_another_place(liar, ask):
    entry = liar.replica.store.get(ask.position - 1).entry
    return Promise(attempt=ask.attempt, accepted_attempt=0, entry=deflated(entry))


def of_a_later_ballot(liar, ask):
    return named(liar, ask, accepted_attempt=ask.attempt)


def without_reports(liar, ask):
    return named(liar, ask, reports=b"r" * 32)


def named(liar, ask, accepted_attempt=0, **changes):
    last = Entry.decode(liar.replica.store.get(ask.position - 1).entry)
    changes |= {"position": ask.position, "previous_chain": liar.replica.chain, "electorate": ()}
    entry = deflated(last.model_copy(update=changes).encode())
    return Promise(attempt=ask.attempt, accepted_attempt=accepted_attempt, entry=entry)


@pytest.mark.parametrize(
    "lie",
    [
        bomb,
        of_another_place,
        without_reports,
        pytest.param(noise, marks=pytest.mark.exhaustive),
        pytest.param(of_a_later_ballot, marks=pytest.mark.exhaustive),
    ],
)
def test_a_promise_of_what_cannot_be_proposed_counts_for_nothing(tmp_path, monkeypatch, lie):
    """The liar leads in silence, and its promise is the first that the next leader gets."""
    prepare = Voter._prepare
    told = []

    async def scenario(swarm):
        *honest, liar = await swarm.start(4)
        await swarm.until(lambda: reached([*honest, liar], 2))
        stop_at(monkeypatch, liar.ctx.me, "_form")

        async def promise(voter, remote, ask):
            if voter._ctx.me != liar.ctx.me or remote == liar.ctx.me.peer_id:
                await asyncio.sleep(0.2)  # the liar's promise comes first
                return await prepare(voter, remote, ask)
            told.append(term_of(ask.attempt))
            return lie(liar, ask)

        monkeypatch.setattr(Voter, "_prepare", promise)
        at = max(p.replica.position for p in honest)
        await swarm.until(lambda: reached(honest, at + 6) and told, timeout_s=200)
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8")


def alone(liar, ask, **changes):
    """An entry of the liar's own work, with parts that nobody has; another one at each ballot."""
    name, replica = liar.identity.peer_id, liar.replica
    did = {"weight": 128.0, "tokens": 1280, "steps": 10, "norm": 1.0}
    ready = Ready.decode(ready_of(liar.identity, liar, incarnation=liar.incarnation, **did)[1:])
    members = tuple(admit([(name, ready.report)], clip_at=2.0, carried=0.0))
    cells = len(liar.ctx.replay.cells_at(ask.position))
    digest = sha256(b"nobody has this %d" % ask.attempt)
    part = Part(
        start_cell=0,
        stop_cell=cells,
        owner=0,
        generation=0,
        wire_bytes=100,
        digest=digest,
        partial=(),
    )
    sworn = Sworn(counts=True, uplink_mbit_s=100.0, signature=ready.signature)
    reports = (sworn.model_copy(update=changes),)
    parts = (part,)
    then = succeed(replica.voters, position=ask.position, fragment=0, members=members, parts=parts)
    last = Entry.decode(replica.store.get(ask.position - 1).entry)
    entry = {
        "position": ask.position,
        "previous_chain": replica.chain,
        "members": members,
        "parts": parts,
        "reports": reports_root(reports),
        "electorate": then.electorate,
        "newcomers": then.newcomers,
        "norms": then.norms,
        "state_root": None,
    }
    return Promise(
        attempt=ask.attempt,
        accepted_attempt=ask.attempt - 1,
        entry=deflated(last.model_copy(update=entry).encode()),
        reports=reports,
    )


def of_forged_reports(liar, ask):
    return alone(liar, ask, signature=b"forged %d" % ask.attempt)


def of_work_in_vain(liar, ask):
    return alone(liar, ask, counts=False)


@pytest.mark.parametrize("lie", [alone, of_forged_reports, of_work_in_vain])
def test_naming_another_entry_at_each_ballot_stops_no_term(tmp_path, monkeypatch, lie):
    """The liar leads in silence and promises first; nobody blames those who have to adopt it."""
    prepare = Voter._prepare
    told, blamed = [], []

    async def scenario(swarm):
        *honest, liar = await swarm.start(4)
        await swarm.until(lambda: reached([*honest, liar], 2))
        stop_at(monkeypatch, liar.ctx.me, "_form")
        for peer in honest:
            monkeypatch.setattr(peer.ctx, "fault", lambda who, why: blamed.append(who))

        async def promise(voter, remote, ask):
            if voter._ctx.me != liar.ctx.me or remote == liar.ctx.me.peer_id:
                await asyncio.sleep(0.2)
                return await prepare(voter, remote, ask)
            told.append(ask)
            return lie(liar, ask)

        monkeypatch.setattr(Voter, "_prepare", promise)
        await swarm.until(lambda: told)
        at, since_s = told[0].position, swarm.now()
        await swarm.until(lambda: reached(honest, at + 1))
        assert swarm.now() - since_s < 20 * SETTINGS.stall_s  # two polls at most
        assert not set(blamed) & {peer.identity.peer_id for peer in honest}
        assert swarm.same_bits(honest)

    run_swarm(tmp_path, scenario, codec="int8", layout=SMALL)
