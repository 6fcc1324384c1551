"""Keepers lead and vote, trainers train: neither needs the other's work."""

import asyncio
from dataclasses import dataclass, field

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.optim.log.entry import Elector, Entry, leader_order
from atoll.peer.rounds.consensus.ballots import NOWHERE, Ballots, Booth, Leads, Place, leader_of
from atoll.peer.rounds.messages import Prepare, Propose, Voted, deflated
from support.swarm import identity_of, reached, run_swarm


def run(folder, scenario):
    run_swarm(folder, scenario, electors="keepers")


@dataclass
class Disk:
    """Outlives a keeper's process."""

    place: Place = NOWHERE
    writes: list[Place] = field(default_factory=list)

    def keep(self, place):
        self.place = place
        self.writes.append(place)

    def ballots(self):
        return Ballots(left=self.place, keep=self.keep)


async def begin(swarm, *, keepers=3, trainers=3, disks=()):
    ballots = [disk.ballots() for disk in disks] or [None] * keepers
    voting = [swarm.add(role="keeper", ballots=ballots[i]) for i in range(keepers)]
    training = [swarm.add() for _ in range(trainers)]
    await swarm.begin([*voting, *training])
    return voting, training


def log_of(peer, start=0):
    stored = peer.replica.store.headers(start, peer.replica.position - start)
    return [(Entry.decode(r.entry), r.certificate) for r in stored]


def electors(*keepers):
    return tuple(keeper.ctx.me for keeper in keepers)


def test_keepers_decide_what_trainers_contribute(tmp_path):
    async def scenario(swarm):
        keepers, trainers = await begin(swarm)
        everybody = [*keepers, *trainers]
        began = swarm.now()
        await swarm.until(lambda: reached(everybody, 6))
        # Windows of 5 s: no leader waits out a grace for keepers, which never report.
        assert swarm.now() - began < 6 * 6
        assert swarm.same_bits(everybody)
        for entry, _ in log_of(keepers[0]):
            assert entry.electorate == electors(*keepers)
            assert entry.newcomers == ()
            assert {m.peer_id for m in entry.complete_members()} == {
                t.identity.peer_id for t in trainers
            }
        assert all(not keeper.handed_in for keeper in keepers)
        assert all(t.rounds.statistics().left_out == 0 for t in trainers)

    run(tmp_path, scenario)


def test_one_keeper_serves_one_trainer(tmp_path):
    async def scenario(swarm):
        keepers, trainers = await begin(swarm, keepers=1, trainers=1)
        await swarm.until(lambda: reached([*keepers, *trainers], 3))

    run(tmp_path, scenario)


def test_rounds_go_on_without_one_of_three_keepers(tmp_path):
    async def scenario(swarm):
        keepers, trainers = await begin(swarm)
        await swarm.until(lambda: reached(keepers, 2))
        lost, *left = keepers
        lost.kill()
        await swarm.until(lambda: reached([*left, *trainers], 8))
        assert all(e.electorate == electors(*keepers) for e, _ in log_of(left[0]))
        leaders = [leader_of(electors(*keepers), e.position, 0) for e, _ in log_of(left[0], 2)]
        assert lost.ctx.me in leaders  # so another keeper has led its rounds
        assert swarm.same_bits([*left, *trainers])

    run(tmp_path, scenario)


def test_trainers_come_and_go_without_effect_on_the_electorate(tmp_path):
    async def scenario(swarm):
        keepers, trainers = await begin(swarm)
        await swarm.until(lambda: reached(keepers, 2))
        trainers[0].kill()
        new = swarm.add()
        await new.start()
        await swarm.until(lambda: reached([*keepers, new], 14))
        log = log_of(keepers[0])
        assert all(e.electorate == electors(*keepers) for e, _ in log)
        # Beyond the trial after which a trainer would have voted.
        contributed = [e for e, _ in log if new.identity.peer_id in {m.peer_id for m in e.members}]
        assert len(contributed) >= 10
        assert all(e.newcomers == () for e, _ in log)

    run(tmp_path, scenario)


def test_a_group_does_not_wait_for_a_trainer_that_is_late(tmp_path):
    async def scenario(swarm):
        keepers = [swarm.add(role="keeper") for _ in range(3)]
        trainers = [swarm.add(), swarm.add(), swarm.add(window_s=60.0)]
        await swarm.begin([*keepers, *trainers])
        began = swarm.now()
        await swarm.until(lambda: reached(keepers, 4))
        assert swarm.now() - began < 4 * 6

    run(tmp_path, scenario)


def ballot_of(trainer, keeper, attempt):
    """What a trainer would send if it led the next position."""
    replica = keeper.replica
    last, _ = log_of(keeper)[-1]
    entry = last.model_copy(update={"position": replica.position, "previous_chain": replica.chain})
    prepare = Prepare(epoch=replica.epoch, position=replica.position, attempt=attempt)
    signature = trainer.identity.sign(b"any")
    propose = Propose(
        attempt=attempt, entry=deflated(entry.encode()), reports=(), signature=signature
    )
    voted = Voted(
        epoch=replica.epoch,
        position=replica.position,
        attempt=attempt,
        entry=entry.digest,
        signature=signature,
        proposal=signature,
    )
    return {"prepare": prepare, "propose": propose, "voted": voted}


@pytest.mark.parametrize("method", ["prepare", "propose", "voted"])
def test_a_trainer_that_leads_or_votes_is_refused(tmp_path, method):
    async def scenario(swarm):
        keepers, trainers = await begin(swarm)
        await swarm.until(lambda: reached(keepers, 2))
        for attempt in (0, 4, 8):
            record = ballot_of(trainers[0], keepers[0], attempt)[method].encode()
            call = trainers[0].transport.call
            with pytest.raises(Refused) as refused:
                await call(keepers[0].identity.peer_id, method, record, timeout_s=5.0)
            assert refused.value.code in (RefusalCode.NOT_THE_LEADER, RefusalCode.NO_ELECTOR)
        await swarm.until(lambda: reached(keepers, 5))

    run(tmp_path, scenario)


async def restart(swarm, keeper, disk):
    """The same keeper in a new process, which knows no more than its disk."""
    keeper.kill()
    keeper.replica.store.close()
    again = swarm.add(
        keeper.identity,
        role="keeper",
        incarnation=keeper.incarnation,
        ballots=disk.ballots(),
    )
    await again.replica.resume()
    await again.start()
    return again


def test_a_restarted_keeper_votes_again(tmp_path):
    async def scenario(swarm):
        disks = [Disk(), Disk(), Disk()]
        keepers, trainers = await begin(swarm, disks=disks)
        await swarm.until(lambda: reached(keepers, 3))
        assert len(disks[0].writes) == len(set(disks[0].writes)) <= 4  # once a position
        # One after the other: had each not voted again, no quorum would be left.
        again = []
        for keeper, disk in zip(keepers, disks, strict=True):
            again.append(await restart(swarm, keeper, disk))
            at = max(p.replica.position for p in again)
            await swarm.until(lambda at=at: reached([*again, *trainers], at + 3))
        log = log_of(again[0])
        assert {e.epoch for e, _ in log} == {1}
        assert all(e.electorate == electors(*keepers) for e, _ in log)
        assert swarm.same_bits([*again, *trainers])

    run(tmp_path, scenario)


def test_a_restarted_keeper_abstains_where_it_may_have_voted():
    me = identity_of(0).peer_id
    disk = Disk()
    electorate = tuple(Elector(peer_id=identity_of(n).peer_id, incarnation="1") for n in range(3))
    mine, here, then = electorate[0], Place(1, 7), Place(1, 8)

    def leader(place, term=0):
        return electorate[leader_order(electorate, place.position)[term % 3]].peer_id

    booth = Booth(mine, disk.ballots())
    booth.turn(here, electorate)
    booth.accept(leader(here), here, 0, b"an entry")
    assert disk.place == here

    again = disk.ballots()
    booth, leads = Booth(mine, again), Leads(mine, again)
    booth.turn(here, electorate)
    term = next(t for t in range(3) if leader(here, t) == me)
    for ask in (
        lambda: booth.prepare(leader(here, 1), here, 4),
        lambda: booth.accept(leader(here), here, 0, b"another entry"),
        lambda: leads.begin(here, 4 * term, electorate),
    ):
        with pytest.raises(Refused) as refused:
            ask()
        assert refused.value.code is RefusalCode.LEFT
    booth.turn(then, electorate)
    booth.accept(leader(then), then, 0, b"the next entry")
    assert disk.place == then


def test_a_keeper_signs_nothing_that_it_cannot_remember():
    def full(place):
        raise OSError("no space left")

    ballots = Ballots(keep=full)
    mine = Elector(peer_id=identity_of(0).peer_id, incarnation="1")
    booth, here = Booth(mine, ballots), Place(1, 7)
    booth.turn(here, (mine,))
    with pytest.raises(OSError, match="no space"):
        booth.accept(mine.peer_id, here, 0, b"an entry")
    with pytest.raises(OSError, match="no space"):
        booth.prepare(mine.peer_id, here, 4)
    assert booth.acceptor.accepted is None and booth.acceptor.promised == 0
    proposer = Leads(mine, ballots).begin(here, 0, (mine,))
    with pytest.raises(OSError, match="no space"):
        proposer.choose(b"an entry")


def test_a_keeper_that_stops_waits_for_its_last_vote_and_signs_no_other(tmp_path):
    async def scenario(swarm):
        disk, ending = Disk(), []

        def keep(place):
            disk.keep(place)
            if place == Place(1, 2):  # in the middle of its own proposal
                ending.append(asyncio.create_task(keeper.rounds.end_ballots()))

        keeper = swarm.add(role="keeper", ballots=Ballots(keep=keep))
        trainers = [swarm.add(), swarm.add()]
        await swarm.begin([keeper, *trainers])
        await swarm.until(lambda: bool(ending))
        await ending[0]
        assert reached([keeper], 3)
        await swarm.until(lambda: reached(trainers, 3))
        await asyncio.sleep(60)
        assert not reached([keeper], 4) and disk.place == Place(1, 2)
        again = await restart(swarm, keeper, disk)
        await swarm.until(lambda: reached([again, *trainers], 5))

    run(tmp_path, scenario)
