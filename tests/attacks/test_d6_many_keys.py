"""D6: one person holds many admitted keys, and fills what honest peers share with them."""

import asyncio
from types import SimpleNamespace

import msgpack
import pytest

from atoll.dht import clock
from atoll.dht import roster as rosters
from atoll.dht.identity import Identity
from atoll.dht.refusals import RefusalCode
from atoll.dht.roster import MAX_ASKS, DhtRoster, sign_record
from atoll.dht.transport import Refused, admit_everyone
from atoll.optim.log.entry import Elector
from atoll.peer.rounds.consensus.ballots import leader_of
from atoll.peer.rounds.consensus.leader import MAX_PROBED, Leadership
from atoll.peer.rounds.consensus.leading import MAX_BEGUN
from support.greedy import report_and_live
from support.records import record_of
from support.swarm import reached, ready_of, run_swarm

RUN = "run"


def roster(identity):
    return DhtRoster(None, identity, run_id=RUN, credential=lambda: b"", check=admit_everyone)


def signed(identity, lasts_s):
    record = record_of(identity.peer_id, expires_at=clock.now_s() + lasts_s)
    return sign_record(record, identity, run_id=RUN, credential=b"")


def question(record=b""):
    return msgpack.packb([bytes(32), record])


def test_records_that_last_long_do_not_push_out_those_that_are_renewed(monkeypatch):
    now_s = [clock.now_s()]
    monkeypatch.setattr(clock, "now_s", lambda: now_s[0])
    monkeypatch.setattr(rosters, "MAX_KNOWN", 4)

    async def main():
        ours, honest = roster(Identity.ephemeral()), Identity.ephemeral()
        for _ in range(4):
            await ours.take([signed(Identity.ephemeral(), 300)])
        now_s[0] += 10
        for _ in range(3):
            await ours.take([signed(honest, 20)])
            assert honest.peer_id in ours.known
            now_s[0] += 5
        assert len(ours.known) == 4

    asyncio.run(main())


def test_a_question_brings_no_record_of_others():
    async def main():
        ours, asker, other = (Identity.ephemeral() for _ in range(3))
        here = roster(ours)
        await here.answer(question(signed(other, 20)), asker.peer_id)
        assert here.known == []
        await here.answer(question(signed(asker, 20)), asker.peer_id)
        assert here.known == [asker.peer_id]

    asyncio.run(main())


def test_questions_of_one_peer_are_answered_within_a_budget(monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(rosters.time, "monotonic", lambda: now_s[0])

    async def main():
        here, other = roster(Identity.ephemeral()), Identity.ephemeral()
        await here.take([signed(other, 20)])

        async def answered(peer):
            return bool(msgpack.unpackb(await here.answer(question(), peer)))

        assert [await answered("a") for _ in range(int(MAX_ASKS) + 1)] == [True] * 16 + [False]
        assert await answered("b")
        now_s[0] += 0.5
        assert [await answered("a") for _ in range(3)] == [True, True, False]

    asyncio.run(main())


def test_the_budget_remembers_so_many_peers(monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(rosters.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(rosters, "MAX_KNOWN", 3)

    async def main():
        here = roster(Identity.ephemeral())
        for number in range(9):
            now_s[0] += 4.0
            await here.answer(question(), f"peer {number}")
        assert len(here._asks) <= 4

    asyncio.run(main())


def test_a_leader_asks_so_many_trainers_again_in_one_probe():
    trainers = {f"t{number:03}" for number in range(300)}
    electorate = [Elector(peer_id="t299", incarnation="1")]
    asked_before = {peer: 0.0 for peer in sorted(trainers) if peer != "t000"}
    leadership = SimpleNamespace(_electorate=lambda: electorate, _promised=asked_before)
    due = Leadership._due_for_probe(leadership, trainers)
    assert {"t000", "t299"} <= set(due), "nobody knows of the one, and the other votes"
    assert set(due) - {"t000", "t299"} == {f"t{n:03}" for n in range(1, MAX_PROBED + 1)}


def test_one_caller_begins_so_many_terms(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        key, honest = Identity.ephemeral(), peers[0]
        transport = swarm.network.transport(key.peer_id)
        electorate, position = honest.replica.electorate, honest.replica.position
        first = next(t for t in range(4) if leader_of(electorate, position, t) == honest.ctx.me)
        held = []
        for turn in range(1, MAX_BEGUN + 3):
            ready = ready_of(key, honest, term=first + 4 * turn)
            stream = await transport.open(honest.identity.peer_id, "round", timeout_s=2.0)
            if turn <= MAX_BEGUN:
                held.append(asyncio.create_task(report_and_live(stream, ready)))
                await asyncio.sleep(0.1)
                continue
            await stream.send(ready, timeout_s=2.0)
            with pytest.raises(Refused) as refused:
                await stream.recv(timeout_s=2.0)
            assert refused.value.code is RefusalCode.BUSY
        assert not any(task.done() for task in held)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)

    run_swarm(tmp_path, scenario, codec="int8")


@pytest.mark.parametrize("count", [0, 3])
def test_few_trainers_are_all_asked_in_each_probe(count):
    trainers = {f"t{number}" for number in range(count)}
    leadership = SimpleNamespace(_electorate=list, _promised=dict.fromkeys(trainers, 0.0))
    assert Leadership._due_for_probe(leadership, trainers) == sorted(trainers)
