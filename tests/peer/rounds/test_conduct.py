"""Faults add up, bars end, and nobody is barred for one fault."""

from atoll.peer.rounds.conduct import (
    FIRST_BAR_S,
    MAX_BAR_S,
    MAX_FAULTS,
    MAX_PEERS,
    MEMORY_S,
    Conduct,
    Fault,
)


def commit_faults(conduct, peer, now, count=MAX_FAULTS):
    return [conduct.fault(peer, Fault.BAD_CELL, now) for _ in range(count)][-1]


def test_the_third_fault_bars_for_a_while():
    conduct = Conduct()
    assert commit_faults(conduct, "p", 5.0, MAX_FAULTS - 1) is None
    assert conduct.barred("p", 5.0) is None
    barred = conduct.fault("p", Fault.BAD_CELL, 6.0)
    assert barred is not None
    assert barred.left_s == FIRST_BAR_S
    assert "bad-cell" in str(barred)
    assert conduct.barred("q", 6.0) is None
    assert conduct.barred("p", 6.0 + FIRST_BAR_S) is None


def test_faults_far_apart_do_not_add_up():
    conduct = Conduct()
    for number in range(10):
        assert conduct.fault("p", Fault.BAD_CELL, number * MEMORY_S) is None


def test_each_bar_is_twice_the_one_before_up_to_an_hour():
    conduct, now, bars = Conduct(), 0.0, []
    for _ in range(9):
        barred = commit_faults(conduct, "p", now)
        bars.append(barred.left_s)
        now += barred.left_s
    assert bars[:3] == [FIRST_BAR_S, 2 * FIRST_BAR_S, 4 * FIRST_BAR_S]
    assert bars[-1] == MAX_BAR_S


def test_strangers_cannot_fill_the_memory():
    conduct = Conduct()
    for number in range(MAX_PEERS + 10):
        conduct.fault(str(number), Fault.BAD_WEIGHT, 0.0)
    assert len(conduct._records) == MAX_PEERS


def test_a_peer_that_an_order_evicts_may_read_the_log_and_nothing_else():
    conduct = Conduct(lambda peer: peer == "listed", lambda: ["ordered"])
    conduct.bar_for_good("liar", Fault.EQUIVOCATION)
    out = ("listed", "ordered", "liar")
    assert [conduct.is_out(peer) for peer in (*out, "other")] == [True, True, True, False]
    assert [conduct.may_read(peer) for peer in (*out, "other")] == [False, True, False, True]
    assert conduct.barred("ordered", 0.0).why is Fault.EVICTED
