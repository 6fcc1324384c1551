"""P13 by keepers: they ask for promises of their next terms at once, and so end each other's."""

import asyncio

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused, TransportError
from atoll.optim.log.entry import Elector
from atoll.peer.rounds.consensus.ballots import TERM, Place, leader_of
from atoll.peer.rounds.consensus.turns import MAX_DOUBLINGS, Turns
from atoll.peer.rounds.consensus.voter import HEARD_S
from atoll.peer.rounds.messages import Prepare
from support.attackers import preempt, stop_at
from support.swarm import SETTINGS, reached, run_swarm

POSITION = 5
TIME_S = 30.0
PATIENCE_S = 7 * SETTINGS.grace_s + 14 * SETTINGS.stall_s + 5.0
"""of a member with a leader of a later term, after a round of 5 s"""


def electorate(count):
    return tuple(Elector(peer_id=f"{n:03}", incarnation="1") for n in range(count))


def leader(electors, term):
    return leader_of(electors, POSITION, term).peer_id


class At:
    """The terms of one of some electors: the leader of term 3, which asks nobody for promises."""

    def __init__(self, count=4, first_term=0):
        self.electors = electorate(count)
        self.turns = Turns(self.electors, POSITION, first_term=first_term, now=0.0)
        self.me = leader(self.electors, 3)
        self.told = {e.peer_id: 0 for e in self.electors if e.peer_id != self.me}

    def ask(self, term, now=0.0, **told):
        """The open term after a leader asked for the promise of `term`."""
        self.told |= {leader(self.electors, int(name[1:])): said for name, said in told.items()}
        self.turns.advance(term, self.me, now=now, base_s=TIME_S, told=self.told)
        return self.turns.open_term


def test_a_term_has_its_time_before_the_next_one_opens():
    at = At()
    assert at.ask(1, now=TIME_S - 0.1) == 0
    assert at.ask(1, now=TIME_S) == 1
    assert at.ask(2, now=2 * TIME_S - 0.1) == 1
    assert at.ask(2, now=2 * TIME_S) == 2


def test_a_far_term_opens_no_more_than_the_next_one():
    at = At()
    assert at.ask(1 + 4 * 1000, now=1000 * TIME_S) == 1
    assert at.ask(1 + 4 * 1000, now=1000 * TIME_S) == 1


def test_nobody_asks_and_nothing_opens():
    at = At()
    assert at.ask(0, now=1000 * TIME_S) == 0
    assert at.ask(0, now=0.0, l0=None) == 0


def test_the_terms_of_leaders_that_are_gone_are_passed():
    at = At()
    assert at.ask(2, l0=None, l1=None) == 2
    assert At().ask(2, l1=None) == 0  # its own turn has not come


def test_a_leader_that_gave_up_its_term_is_passed():
    at = At()
    assert at.ask(2, l0=1) == 1
    assert at.ask(2, l1=1) == 1
    assert at.ask(2, l1=2) == 2


def test_the_word_of_liars_opens_the_terms_of_no_others():
    at = At()
    assert at.ask(2, l1=1000) == 0
    seven = At(count=7)
    assert seven.ask(2, l1=1000, l2=1000) == 0


def test_an_acceptor_that_was_away_follows_one_honest_other():
    at = At()
    assert at.ask(50_001, l1=50_001, l2=50_000) == 50_000
    seven = At(count=7)
    assert seven.ask(50_001, l1=50_001, l2=50_001, l4=50_000) == 50_000


def test_a_leader_gives_up_a_term_before_its_turn_as_well():
    at = At()
    at.turns.give_up(3, 1.0)
    assert at.turns.open_term == 0
    assert at.ask(4, now=1.0, l0=4, l1=3) == 4  # the others have come to term 3
    assert at.ask(5, now=2 * TIME_S + 0.9) == 4
    assert at.ask(5, now=2 * TIME_S + 1.0) == 5


def test_an_acceptor_does_not_ask_itself_whether_it_is_gone():
    at = At(first_term=3)
    assert at.ask(4, now=TIME_S - 0.1) == 3
    at.turns.give_up(3, 1.0)
    assert at.ask(5, now=TIME_S + 0.9) == 4
    assert at.ask(5, now=TIME_S + 1.0) == 5


def test_terms_get_twice_the_time_after_each_turn_of_all():
    at = At(first_term=1)
    assert [at.turns.time_s(term, 1.0) for term in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 4]
    assert at.turns.time_s(1 << 40, 1.0) == 1 << MAX_DOUBLINGS


def test_a_promise_waits_for_the_term_before(tmp_path):
    """A liar asks for promises of a term whose turn has not come, or calls on one that lives."""

    async def scenario(swarm):
        keepers = [swarm.add(role="keeper") for _ in range(4)]
        await swarm.begin(keepers)
        replica = keepers[0].replica
        place = {"epoch": replica.epoch, "position": replica.position}
        by_name = {keeper.identity.peer_id: keeper for keeper in keepers}

        def of(term):
            return by_name[leader_of(replica.electorate, replica.position, term).peer_id]

        async def ask(term, acceptor):
            record = Prepare(**place, attempt=term * TERM).encode()
            name = acceptor.identity.peer_id
            await of(term).ctx.transport.call(name, "prepare", record, timeout_s=5)

        for term in (1, 2, 5, 401):
            with pytest.raises(Refused) as refused:
                await ask(term, of(3))
            assert refused.value.code is RefusalCode.UNDER_WAY
        assert of(3).rounds.voter.term == 0
        of(0).kill()
        await asyncio.sleep(HEARD_S)  # what it said before serves so long
        await ask(1, of(3))
        assert of(3).rounds.voter.term == 1
        here = Place(replica.epoch, replica.position)
        of(1).rounds.voter.give_up(here, 0)
        of(1).rounds.voter.give_up(Place(here.epoch, here.position + 1), 1)
        await asyncio.sleep(HEARD_S)
        with pytest.raises(Refused, match=RefusalCode.UNDER_WAY):
            await ask(2, of(3))
        await ask(1, of(1))  # a promise of its own
        of(1).rounds.voter.give_up(here, 1)
        await asyncio.sleep(HEARD_S)
        await ask(2, of(3))
        assert of(3).rounds.voter.term == 2

    run_swarm(tmp_path, scenario, electors="keepers", trust="byzantine")


def test_a_flood_of_questions_is_one_question_to_the_others(tmp_path):
    async def scenario(swarm):
        keepers = [swarm.add(role="keeper") for _ in range(4)]
        await swarm.begin(keepers)
        replica = keepers[0].replica
        liar, honest = (
            next(
                k
                for k in keepers
                if k.ctx.me == leader_of(replica.electorate, replica.position, term)
            )
            for term in (1, 2)
        )
        heads = []

        def count(sender, receiver, method, *rest):
            if (sender, method) == (honest.identity.peer_id, "head"):
                heads.append(receiver)
            return True

        swarm.network.on_message = count
        record = Prepare(epoch=replica.epoch, position=replica.position, attempt=TERM).encode()
        for _ in range(200):
            with pytest.raises((Refused, TransportError)):
                await liar.ctx.transport.call(
                    honest.identity.peer_id, "prepare", record, timeout_s=5
                )
        assert 0 < len(heads) < 200, "the others were asked for each question"

    run_swarm(tmp_path, scenario, electors="keepers", trust="byzantine")


def test_a_position_that_stalled_makes_nobody_wait_longer_for_the_next(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 4))
        at, usual_s = peers[0].replica.position, peers[0].replica.stood_s
        assert 4 < usual_s < 10  # a window of 5 s and its round
        swarm.network.on_message = lambda *message: False
        await asyncio.sleep(60)
        swarm.network.on_message = None
        await swarm.until(lambda: reached(peers, at + 1))
        assert all(peer.replica.stood_s < 2 * usual_s for peer in peers)

    run_swarm(tmp_path, scenario)


@pytest.mark.parametrize(
    ("count", "liars"), [(4, 1), pytest.param(7, 2, marks=pytest.mark.exhaustive)]
)
def test_keepers_that_prepare_again_and_again_stop_nothing(tmp_path, monkeypatch, count, liars):
    async def scenario(swarm):
        keepers = [swarm.add(role="keeper") for _ in range(count)]
        trainers = [swarm.add() for _ in range(3)]
        await swarm.begin([*keepers, *trainers])
        await swarm.until(lambda: reached(keepers, 2))
        lying, honest = keepers[-liars:], keepers[:-liars]
        for liar in lying:
            stop_at(monkeypatch, liar.ctx.me, "_form")
        tasks = [asyncio.create_task(preempt(liar, keepers)) for liar in lying]
        replica = honest[0].replica
        for _ in range(6):
            at, began_s = replica.position, swarm.now()
            await swarm.until(
                lambda at=at: reached([*honest, *trainers], at + 1),
                timeout_s=(liars + 1) * PATIENCE_S,
            )
            assert swarm.now() - began_s < (liars + 1) * PATIENCE_S
        assert replica.epoch == honest[-1].replica.epoch
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_swarm(tmp_path, scenario, electors="keepers", trust="byzantine")
