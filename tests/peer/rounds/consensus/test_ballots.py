"""The rules of votes, one by one; all of them together are in ``test_model_check.py``."""

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.optim.log.entry import Elector
from atoll.peer.rounds.consensus.ballots import (
    TERM,
    Accepted,
    Acceptor,
    Booth,
    Leads,
    Place,
    Proposer,
    leader_of,
    term_of,
    value_to_propose,
)


def test_a_promise_binds():
    acceptor = Acceptor()
    assert acceptor.prepare(2)
    assert not acceptor.prepare(1)
    assert not acceptor.accept(1, b"late")
    assert acceptor.accept(2, b"entry")
    assert acceptor.accepted == Accepted(attempt=2, entry=b"entry")


def test_a_leader_that_proposes_twice_is_refused():
    acceptor = Acceptor()
    assert acceptor.accept(0, b"one")
    assert acceptor.accept(0, b"one")
    assert not acceptor.accept(0, b"two")


def test_an_attempt_has_one_lock():
    acceptor = Acceptor()
    one, two = Accepted(attempt=1, entry=b"one"), Accepted(attempt=1, entry=b"two")
    assert acceptor.commit(one)
    assert acceptor.commit(one)
    assert not acceptor.commit(two)
    assert acceptor.locked == one
    assert not acceptor.prepare(1)
    assert acceptor.prepare(2)
    assert not acceptor.commit(one)


def test_the_entry_of_the_highest_attempt_is_proposed():
    promises = [None, Accepted(attempt=1, entry=b"old"), Accepted(attempt=3, entry=b"new")]
    assert value_to_propose(promises) == b"new"
    assert value_to_propose([None, None]) is None


ME, OTHER = (Elector(peer_id=name, incarnation="0") for name in ("me", "other"))
HERE, NEXT = Place(1, 4), Place(1, 5)


def leads(position, attempt):
    return leader_of((ME, OTHER), position, term_of(attempt))


def refusal(call, *args):
    with pytest.raises(Refused) as error:
        call(*args)
    return error.value.code


def test_a_booth_refuses_by_name():
    booth = Booth(ME)
    booth.turn(HERE, (ME, OTHER))
    leader, other = leads(4, TERM).peer_id, leads(4, 0).peer_id
    assert booth.prepare(leader, HERE, TERM) is None
    assert refusal(booth.prepare, leader, NEXT, TERM) == RefusalCode.ELSEWHERE
    assert refusal(booth.prepare, other, HERE, TERM) == RefusalCode.NOT_THE_LEADER
    assert refusal(booth.accept, other, HERE, 0, b"late") == RefusalCode.SUPERSEDED
    booth.turn(HERE, (OTHER,))
    assert refusal(booth.accept, leader, HERE, TERM, b"entry") == RefusalCode.NO_ELECTOR


def test_a_booth_votes_no_more_where_it_was_before():
    booth = Booth(ME)
    booth.turn(HERE, (ME, OTHER))
    assert booth.turn(NEXT, (ME, OTHER))
    booth.turn(HERE, (ME, OTHER))
    assert refusal(booth.accept, leads(4, 0).peer_id, HERE, 0, b"entry") == RefusalCode.LEFT
    assert booth.promised == 0
    booth.turn(Place(2, 3), (ME, OTHER))
    booth.accept(leads(3, 0).peer_id, Place(2, 3), 0, b"entry")


def test_a_booth_on_its_way_back_to_the_base_of_an_epoch_votes_there():
    booth = Booth(ME)
    booth.turn(HERE, (ME, OTHER))
    booth.accept(leads(4, 0).peer_id, HERE, 0, b"entry")
    booth.turn(NEXT, (ME, OTHER))
    beyond, base = Place(2, 5), Place(2, 4)
    booth.turn(beyond, ())  # the entry before it is void in this epoch
    assert refusal(booth.prepare, leads(5, TERM).peer_id, beyond, TERM) == RefusalCode.NO_ELECTOR
    assert booth.promised == 0
    assert booth.turn(base, (ME, OTHER))
    booth.accept(leads(4, 0).peer_id, base, 0, b"another")
    booth.turn(beyond, (ME, OTHER))
    booth.accept(leads(5, 0).peer_id, beyond, 0, b"its successor")


def test_electors_that_come_to_a_booth_where_it_stands_begin_it():
    booth = Booth(ME)
    booth.turn(HERE, ())
    booth.retire()
    assert booth.retired
    assert booth.turn(HERE, (ME, OTHER), first_term=1)
    assert booth.promised == TERM
    assert not booth.turn(HERE, (OTHER, ME))


def test_who_retires_votes_for_nothing_new_and_says_so_when_that_holds():
    booth = Booth(ME)
    booth.turn(HERE, (ME, OTHER))
    assert not booth.retired
    booth.accept(leads(4, 0).peer_id, HERE, 0, b"entry")
    booth.retire()
    assert not booth.retired  # what it voted for may be decided
    booth.accept(leads(4, 0).peer_id, HERE, 0, b"entry")
    booth.turn(NEXT, (ME, OTHER))
    assert booth.retired
    assert refusal(booth.accept, leads(5, 0).peer_id, NEXT, 0, b"entry") == RefusalCode.RETIRED
    assert refusal(booth.prepare, leads(5, TERM).peer_id, NEXT, TERM) == RefusalCode.RETIRED
    booth.turn(HERE, (ME, OTHER))
    assert not booth.retired  # it voted here, and has forgotten for what


def test_an_attempt_is_led_once_and_by_its_leader():
    attempt = next(a for a in (0, TERM) if leads(4, a) == ME)
    mine = Leads(ME)
    mine.begin(HERE, attempt, (ME, OTHER))
    assert refusal(mine.begin, HERE, attempt, (ME, OTHER)) == RefusalCode.SUPERSEDED
    mine.begin(HERE, attempt + 1, (ME, OTHER))
    mine.begin(HERE, attempt + 2 * TERM, (ME, OTHER))
    assert refusal(mine.begin, HERE, attempt + TERM, (ME, OTHER)) == RefusalCode.NOT_THE_LEADER
    assert refusal(mine.begin, HERE, attempt, ()) == RefusalCode.NO_ELECTOR
    again = Leads(Elector(peer_id="me", incarnation="1"))
    assert refusal(again.begin, HERE, attempt, (ME, OTHER)) == RefusalCode.NOT_THE_LEADER


def test_no_attempt_of_an_old_term_is_led_again():
    attempt = next(a for a in (0, TERM) if leads(4, a) == ME)
    mine, terms = Leads(ME), range(attempt, attempt + 200 * TERM, 2 * TERM)
    for each in terms:
        mine.begin(HERE, each, (ME, OTHER))
    for each in terms[::10]:
        assert refusal(mine.begin, HERE, each, (ME, OTHER)) == RefusalCode.SUPERSEDED
    mine.begin(HERE, terms[-1] + 1, (ME, OTHER))
    assert refusal(mine.begin, HERE, terms[0] + 1, (ME, OTHER)) == RefusalCode.SUPERSEDED


def test_an_attempt_of_a_position_that_was_left_is_not_led_again():
    mine = Leads(ME)
    attempts = {p: next(a for a in (0, TERM) if leads(p, a) == ME) for p in (4, 5)}
    mine.begin(HERE, attempts[4], (ME, OTHER))
    mine.begin(NEXT, attempts[5], (ME, OTHER))
    assert refusal(mine.begin, HERE, attempts[4], (ME, OTHER)) == RefusalCode.SUPERSEDED
    later = attempts[4] + 2 * TERM  # one that was not led there, and not at the next either
    assert refusal(mine.begin, HERE, later, (ME, OTHER)) == RefusalCode.SUPERSEDED


def promised(*entries):
    """A leader with promises that name these entries, each of a lower attempt than the last."""
    proposer = Proposer(attempt=12, electors=5)
    for elector, entry in enumerate(entries):
        named = Accepted(attempt=10 - elector, entry=entry) if entry else None
        proposer.promise(elector, named)
    return proposer


def test_an_entry_below_the_one_that_is_passed_over_may_be_decided():
    """A liar names what nobody else has accepted, above what the others have decided."""
    proposer = promised(b"lie", b"decided", b"decided", None, None)
    assert not proposer.may_be_decided(b"lie")
    proposer.pass_over()
    assert proposer.adopted() == b"decided"
    assert proposer.may_be_decided(b"decided")  # the liar may have voted for it as well
    with pytest.raises(RuntimeError, match="no quorum"):
        proposer.pass_over()
    assert proposer.choose(b"mine") == b"decided"


def test_entries_are_passed_over_one_by_one():
    proposer = promised(b"lie", b"alone", None, None)
    proposer.pass_over()
    assert proposer.may_be_decided(b"alone")  # by these two and the one that has not promised
    proposer.promise(4, None)
    assert proposer.adopted() == b"alone"
    proposer.pass_over()
    assert proposer.choose(b"mine") == b"mine"


def test_a_leader_chooses_once_and_not_before_a_quorum_promised():
    proposer = Proposer(attempt=1, electors=3)
    with pytest.raises(RuntimeError, match="quorum"):
        proposer.choose(b"mine")
    proposer.promise(0, None)
    proposer.promise(2, Accepted(attempt=0, entry=b"theirs"))
    assert proposer.choose(b"mine") == proposer.choose(b"another") == b"theirs"
    first = Proposer(attempt=0, electors=3)
    assert first.choose(b"mine") == first.choose(b"another") == b"mine"
