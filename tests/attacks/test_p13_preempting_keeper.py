"""P13 by a keeper: it asks for promises of its next term at once, and so ends each other's term."""

import asyncio
from contextlib import suppress

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused, TransportError
from atoll.optim.log.entry import Elector
from atoll.peer.rounds.consensus.round import MAX_TERMS_AHEAD, TERM, Booth, Place, leader_of
from atoll.peer.rounds.messages import Prepare
from support.swarm import reached, run_swarm

ELECTORATE = tuple(Elector(peer_id=name, incarnation="1") for name in "abcd")
HERE = Place(0, 5)


def booth():
    made = Booth(ELECTORATE[0], trust="byzantine")
    made.turn(HERE, ELECTORATE)
    return made


def prepare(made, term):
    made.prepare(leader_of(ELECTORATE, HERE.position, term).peer_id, HERE, term * TERM)


def test_no_keeper_leads_two_terms_without_the_others_in_between():
    made = booth()
    for term in (1, 2, 3):
        prepare(made, term)
    for term in (7, 7 + 4 * 1000):
        with pytest.raises(Refused, match=RefusalCode.FAR_TERM):
            prepare(made, term)
    prepare(made, 4)  # the term of an honest leader, which the liar does not end either
    with pytest.raises(Refused, match=RefusalCode.FAR_TERM):
        prepare(made, 7)
    assert made.promised == 4 * TERM


@pytest.mark.parametrize("lost", range(4))
def test_three_keepers_of_four_come_to_any_term(lost):
    made = booth()
    for term in range(1, 40):
        if term % 4 != lost:
            prepare(made, term)
    assert term_reached(made) >= 38


def test_a_keeper_that_was_cut_off_follows_two_others():
    made = booth()
    for term in (50_000, 50_001):
        with pytest.raises(Refused, match=RefusalCode.FAR_TERM):
            prepare(made, term)
    prepare(made, 50_002)
    assert term_reached(made) == 50_002


def term_reached(made):
    return made.promised // TERM


@pytest.mark.parametrize("ahead", [1, MAX_TERMS_AHEAD - 8])
def test_a_keeper_that_prepares_again_and_again_stops_nothing(tmp_path, ahead):
    async def scenario(swarm):
        keepers = [swarm.add(role="keeper") for _ in range(4)]
        trainers = [swarm.add() for _ in range(3)]
        await swarm.begin([*keepers, *trainers])
        await swarm.until(lambda: reached(keepers, 2))
        liar, honest = keepers[-1], keepers[:-1]
        replica, name = honest[0].replica, liar.identity.peer_id

        async def attack():
            while True:
                begin = max(keeper.rounds.voter.term for keeper in honest) + ahead
                term = next(
                    t
                    for t in range(begin, begin + len(keepers))
                    if leader_of(replica.electorate, replica.position, t).peer_id == name
                )
                place = {"epoch": replica.epoch, "position": replica.position}
                ask = Prepare(**place, attempt=term * TERM).encode()
                for keeper in honest:
                    with suppress(TransportError, Refused):
                        await liar.ctx.transport.call(
                            keeper.identity.peer_id, "prepare", ask, timeout_s=2
                        )
                await asyncio.sleep(0.2)

        task = asyncio.create_task(attack())
        at, began = replica.position, swarm.now()
        await swarm.until(lambda: reached([*honest, *trainers], at + 4), timeout_s=1000)
        assert swarm.now() - began < 4 * 20  # windows of 5 s
        assert replica.epoch == honest[-1].replica.epoch
        task.cancel()

    run_swarm(tmp_path, scenario, electors="keepers", trust="byzantine")
