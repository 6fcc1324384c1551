"""The electors of a run stay few however many candidates it has."""

from atoll.optim.log.entry import MAX_ELECTORS, Elector, choose_electors


def electors(count, incarnation="a"):
    return [Elector(peer_id=f"peer{i}", incarnation=incarnation) for i in range(count)]


def test_sixty_four_electors_are_chosen_as_they_come():
    given = electors(MAX_ELECTORS)
    assert choose_electors(given) == tuple(given)


def test_of_a_thousand_candidates_64_are_chosen_in_the_entrys_order():
    given = electors(1000)
    chosen = choose_electors(given)
    assert len(chosen) == MAX_ELECTORS
    assert list(chosen) == [e for e in given if e in set(chosen)]
    assert set(choose_electors(given[::-1])) == set(chosen)


def test_electors_stay_members_and_one_that_leaves_is_replaced():
    given = electors(1000)
    before = set(choose_electors(given))
    gone = next(iter(before))
    after = set(choose_electors([e for e in given if e != gone]))
    assert len(after) == MAX_ELECTORS
    assert before - after == {gone}


def test_a_restarted_peer_draws_anew():
    before = {e.peer_id for e in choose_electors(electors(1000))}
    after = {e.peer_id for e in choose_electors(electors(1000, incarnation="b"))}
    assert len(before & after) < MAX_ELECTORS / 2
