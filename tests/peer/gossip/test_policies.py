"""Test which peers meet and which invitations are refused, from one peer's view."""

from collections import Counter

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.peer.gossip.policies import (
    Draw,
    Invited,
    Verdict,
    answer,
    brought_level,
    draw,
    patience_s,
)

RUN_ID = b"r" * 32
PEERS = ["ann", "bob", "cat", "dan", "eve"]


def drawn(me, position, *, others=None):
    return draw(me, others or set(PEERS) - {me}, run_id=RUN_ID, position=position)


def test_all_who_see_the_same_peers_agree_who_meets_whom():
    for position in range(40):
        found = {peer: drawn(peer, position) for peer in PEERS}
        alone = [peer for peer, each in found.items() if each.partner is None]
        assert len(alone) == 1
        for peer, each in found.items():
            if each.partner is not None:
                other = found[each.partner]
                assert other.partner == peer
                assert other.invites != each.invites


def test_everyone_meets_everyone_and_is_alone_in_turn():
    met = Counter(frozenset({p, drawn(p, r).partner}) for r in range(200) for p in PEERS)
    assert len(met) == 10 + len(PEERS)


def test_who_is_alone_in_the_run_meets_nobody():
    assert draw("ann", [], run_id=RUN_ID, position=3) == Draw(partner=None, invites=True)


def test_another_run_draws_other_pairs():
    one = [drawn("ann", r).partner for r in range(20)]
    two = [
        draw("ann", set(PEERS) - {"ann"}, run_id=b"x" * 32, position=r).partner for r in range(20)
    ]
    assert one != two


@pytest.mark.parametrize(
    ("own", "others", "by", "level"),
    [
        (3, [], 2, 3),
        (3, [4, 4, 4], 2, 3),  # one behind is late, no more
        (3, [4, 4, 4], 1, 4),
        (3, [9, 8, 2], 2, 8),  # the furthest that two have reached
        (3, [10**9, 3, 3], 2, 3),  # one liar moves nobody who knows two
        (3, [7], 2, 7),
        (9, [7, 7], 2, 9),
    ],
)
def test_who_is_behind_takes_over_the_count(own, others, by, level):
    assert brought_level(own, others, by=by) == level


def test_patience_grows_to_a_window_for_who_met_nobody():
    assert patience_s(3.0, 60.0, 0) == 3.0
    assert patience_s(3.0, 60.0, 1) == 30.0
    assert patience_s(3.0, 60.0, 2) == patience_s(3.0, 60.0, 9) == 60.0
    assert patience_s(3.0, 1.0, 5) == 3.0


def view(**changes):
    values = {
        "remote": "ann",
        "their_round": 5,
        "own_round": 5,
        "partner": "ann",
        "meeting": None,
        "has_window": True,
        "is_open": True,
        "ready_in_s": 0.0,
        "left_s": 3.0,
    }
    return Invited(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Verdict.ACCEPT),
        ({"partner": "bob"}, RefusalCode.ELSEWHERE),
        ({"partner": None}, RefusalCode.ELSEWHERE),
        ({"meeting": "bob"}, RefusalCode.PAIRED),
        ({"own_round": 6}, RefusalCode.AHEAD),
        ({"is_open": False}, Verdict.WAIT),
        ({"own_round": 4}, Verdict.WAIT),  # it may be brought level
        ({"has_window": False, "is_open": False, "ready_in_s": 2.0}, Verdict.WAIT),
        ({"has_window": False, "is_open": False, "ready_in_s": 4.0}, RefusalCode.TRAINING),
        ({"has_window": False, "is_open": False, "ready_in_s": None}, RefusalCode.TRAINING),
    ],
)
def test_an_invited_peer_answers(changes, verdict):
    assert answer(view(**changes)) is verdict
