"""P13: a report, or a prepare, names a term so far that nobody could lead the position after it."""

import asyncio
from collections import Counter

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.optim.log.entry import Elector
from atoll.peer.rounds.consensus.ballots import MAX_TERMS_AHEAD, TERM, Booth, Place, leader_of
from support.attackers import LAST, call_far_terms
from support.swarm import identity_of, reached, run_swarm

ELECTORATE = tuple(Elector(peer_id=name, incarnation="1") for name in "abc")
HERE = Place(0, 5)


def booth():
    made = Booth(ELECTORATE[0])
    made.turn(HERE, ELECTORATE)
    return made


def prepare(made, term):
    made.prepare(leader_of(ELECTORATE, HERE.position, term).peer_id, HERE, term * TERM)


@pytest.mark.parametrize("term", [MAX_TERMS_AHEAD + 1, LAST])
def test_an_elector_promises_nothing_to_terms_that_no_outage_explains(term):
    made = booth()
    with pytest.raises(Refused, match=RefusalCode.FAR_TERM):
        prepare(made, term)
    assert made.promised == 0


def test_an_elector_that_was_cut_off_for_long_follows_the_others_at_once():
    made = booth()
    prepare(made, 50_000)  # a day of terms at stalls of 1.5 s
    assert made.promised == 50_000 * TERM


def test_reports_of_far_terms_move_no_elector(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        liar = identity_of(99)
        stranger = swarm.network.transport(liar.peer_id)
        refused = Counter()

        task = asyncio.create_task(call_far_terms(stranger, liar, peers, refused))
        at = max(p.replica.position for p in peers)
        await swarm.until(lambda: reached(peers, at + 4))
        task.cancel()
        assert RefusalCode.FAR_TERM in refused
        assert all(p.rounds.voter.term < 4 for p in peers)
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario, codec="int8")
