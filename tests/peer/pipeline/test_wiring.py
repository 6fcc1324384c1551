import random
from collections import Counter

import pytest

from atoll.peer.pipeline.wiring import MAX_BAN_S, MAX_PAUSE_S, Backoff, Wiring

ROWS = 100


def wiring(*peers, seed=1):
    made = Wiring(random.Random(seed))
    for peer in peers:
        made.appeared(peer, incarnation="i0")
    return made


def serve(wired, row_s, *, until_s, in_flight=12, latency_s=0.05, now_s=0.0):
    """Keep microbatches in flight at peers that compute one after another; return the shares."""
    free_s, running, shares = dict.fromkeys(row_s, now_s), [], Counter()
    while now_s < until_s:
        while len(running) < in_flight:
            reservation = wired.reserve(rows=ROWS, now_s=now_s, without=wired.peers - row_s.keys())
            peer = reservation.peer
            free_s[peer] = max(free_s[peer], now_s + latency_s) + ROWS * row_s[peer]
            running.append((free_s[peer] + latency_s, len(shares), reservation))
            shares[peer] += 1
        running.sort(key=lambda each: each[0])
        now_s, _, reservation = running.pop(0)
        wired.receipt(reservation, now_s)
    return shares


def test_shares_are_in_proportion_to_throughput():
    row_s = {"slow": 4e-3, "usual": 2e-3, "fast": 1e-3}
    wired = wiring(*row_s)
    serve(wired, row_s, until_s=60)
    shares = serve(wired, row_s, until_s=260, now_s=60)
    total = sum(shares.values())
    for peer, part in {"slow": 1 / 7, "usual": 2 / 7, "fast": 4 / 7}.items():
        assert shares[peer] / total == pytest.approx(part, rel=0.2)
    assert total * ROWS / 200 > 0.9 * (250 + 500 + 1000)  # of the sum of all peers


def test_a_newcomer_is_tried_and_not_flooded():
    row_s = {"b0": 1e-3, "b1": 1e-3, "b2": 1e-3}
    wired = wiring("b0", "b1")
    serve(wired, {peer: row_s[peer] for peer in ("b0", "b1")}, until_s=100)
    wired.appeared("b2", incarnation="i0")
    first = [wired.reserve(rows=ROWS, now_s=100).peer for _ in range(12)]
    assert 2 <= first.count("b2") <= 6


def test_a_peer_that_returns_nothing_gets_no_more_than_its_queue():
    wired = wiring("b0", "b1")
    for peer in ("b0", "b1"):
        wired.receipt(wired.reserve(rows=ROWS, now_s=19, without=wired.peers - {peer}), 19.1)
    silent = [wired.reserve(rows=ROWS, now_s=20, without={"b0"}) for _ in range(6)]
    now_s, shares = 20.0, Counter()
    for _ in range(50):
        now_s += 0.1
        reservation = wired.reserve(rows=ROWS, now_s=now_s)
        shares[reservation.peer] += 1
        if reservation.peer == "b0":
            wired.receipt(reservation, now_s + 0.09)
    assert shares["b1"] <= 3
    for reservation in silent:
        wired.settle(reservation)
    assert Counter(wired.reserve(rows=ROWS, now_s=now_s).peer for _ in range(10))["b1"] >= 3


def test_a_reservation_may_be_settled_twice():
    wired = wiring("b0", "b1")
    done = wired.reserve(rows=ROWS, now_s=0, without={"b1"})
    wired.receipt(done, 0.1)
    wired.settle(done)
    wired.was_slow(wired.reserve(rows=ROWS, now_s=0, without={"b0"}), 5.0)
    assert [wired.reserve(rows=ROWS, now_s=6).peer for _ in range(5)] == ["b0"] * 5


def test_an_announced_rate_is_believed_within_bounds():
    wired = wiring("b0")
    wired.receipt(wired.reserve(rows=ROWS, now_s=0), ROWS * 1e-2)
    wired.appeared("liar", incarnation="i0", rows_per_s=1e12)
    wired.appeared("modest", incarnation="i0", rows_per_s=1e-12)
    rates = wired.rows_per_s()
    assert rates["liar"] / rates["b0"] == pytest.approx(4)
    assert rates["modest"] / rates["b0"] < 1


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_rate_that_is_none_counts_as_usual(rate):
    wired = wiring("b0")
    wired.appeared("b1", incarnation="i0", rows_per_s=rate)
    assert wired.rows_per_s()["b1"] == wired.rows_per_s()["b0"]


def test_time_outs_reduce_a_share():
    wired = wiring("b0", "b1")
    for _ in range(20):
        reservation = wired.reserve(rows=ROWS, now_s=0.0)
        if reservation.peer == "b1":
            wired.was_slow(reservation, 30.0)
        else:
            wired.receipt(reservation, 0.1)
    shares = Counter(wired.reserve(rows=ROWS, now_s=40.0).peer for _ in range(20))
    assert shares["b0"] >= 19


def test_busy_pauses_for_a_moment_and_never_bans():
    wired = wiring("b0")
    for tries in range(50):
        now_s = 100.0 * tries
        wired.was_busy(wired.reserve(rows=ROWS, now_s=now_s), 1e9, now_s)
        assert wired.reserve(rows=ROWS, now_s=now_s + 0.01) is None
        assert wired.next_free_s(now_s) <= now_s + 1.5 * MAX_PAUSE_S
        assert wired.banned(now_s) == frozenset()
    assert wired.reserve(rows=ROWS, now_s=1e6) is not None


def test_a_busy_peer_keeps_its_share():
    wired = wiring("b0", "b1")
    for now_s in range(20):
        reservation = wired.reserve(rows=ROWS, now_s=now_s, without={"b1"})
        wired.was_busy(reservation, 0.1, now_s)
        wired.settle(reservation)
    shares = Counter(wired.reserve(rows=ROWS, now_s=100).peer for _ in range(20))
    assert shares == {"b0": 10, "b1": 10}


def test_bans_double_and_end():
    wired, lengths = wiring("b0"), []
    now_s = 0.0
    for _ in range(12):
        wired.was_unreachable(wired.reserve(rows=ROWS, now_s=now_s), now_s)
        assert wired.banned(now_s) == {"b0"}
        free_s = wired.next_free_s(now_s)
        lengths.append(free_s - now_s)
        now_s = free_s
    assert lengths[3] > 2 * lengths[0] and lengths[6] > 2 * lengths[3]
    assert max(lengths) <= 1.5 * MAX_BAN_S
    wired.receipt(wired.reserve(rows=ROWS, now_s=now_s), now_s + 1)
    wired.was_unreachable(wired.reserve(rows=ROWS, now_s=now_s + 1), now_s + 1)
    assert wired.next_free_s(now_s) - now_s - 1 <= 1.5 * 4  # the count began anew


def test_a_new_incarnation_ends_a_ban():
    wired = wiring("b0")
    wired.was_unreachable(wired.reserve(rows=ROWS, now_s=0), 0)
    assert not wired.appeared("b0", incarnation="i0")
    assert wired.reserve(rows=ROWS, now_s=0.1) is None
    assert wired.appeared("b0", incarnation="i1")
    assert wired.reserve(rows=ROWS, now_s=0.1).incarnation == "i1"


def test_word_of_a_former_process_changes_nothing():
    wired = wiring("b0")
    old = wired.reserve(rows=ROWS, now_s=0)
    wired.appeared("b0", incarnation="i1")
    before = wired.rows_per_s()
    wired.was_unreachable(old, 1.0)
    wired.was_slow(old, 1.0)
    wired.receipt(old, 1.0)
    assert wired.rows_per_s() == before and not wired.banned(1.0)


def test_an_error_of_its_own_costs_a_peer_nothing():
    wired = wiring("b0", "b1")
    for now_s in range(10):
        wired.settle(wired.reserve(rows=ROWS, now_s=now_s, without={"b1"}))
    shares = Counter(wired.reserve(rows=ROWS, now_s=20).peer for _ in range(20))
    assert shares == {"b0": 10, "b1": 10} and not wired.banned(20)


def test_after_a_ban_a_peer_is_tried_before_it_gets_a_queue():
    wired = wiring("b0", "b1")
    serve(wired, {"b0": 1e-3, "b1": 1e-3}, until_s=60, in_flight=1)
    failed = wired.reserve(rows=ROWS, now_s=60, without={"b0"})
    wired.was_unreachable(failed, 60)
    wired.settle(failed)
    again = [wired.reserve(rows=ROWS, now_s=1000) for _ in range(20)]
    tried = [each for each in again if each.peer == "b1"]
    assert 2 <= len(tried) <= 6
    wired.receipt(tried[0], 1000.1)
    assert Counter(wired.reserve(rows=ROWS, now_s=1001).peer for _ in range(8))["b1"] >= 7


def test_without_peers_nothing_is_reserved():
    wired = wiring()
    assert wired.reserve(rows=ROWS, now_s=0) is None and wired.next_free_s(0) is None
    wired.appeared("b0", incarnation="i0")
    assert wired.reserve(rows=ROWS, now_s=0, without={"b0"}) is None
    wired.left("b0")
    assert wired.peers == frozenset()


def test_an_instant_receipt_leaves_rates_finite():
    wired = wiring("b0")
    wired.receipt(wired.reserve(rows=ROWS, now_s=0), 0)
    assert 0 < wired.rows_per_s()["b0"] < float("inf")


def test_a_backoff_grows_with_jitter_and_ends():
    rng, lengths = random.Random(3), []
    backoff = Backoff(first_s=1.0, max_s=8.0)
    for _ in range(2000):
        now_s = max(0.0, backoff.until_s)
        backoff.fail(now_s, rng)
        lengths.append(backoff.until_s - now_s)
    assert lengths[0] <= 1.5 and len(set(lengths)) > 1900
    assert 4 <= min(lengths[3:]) and max(lengths) <= 12
    backoff.end()
    assert backoff.until_s < 0


def test_failures_at_one_time_count_as_one():
    backoff = Backoff(first_s=1.0, max_s=64.0)
    for _ in range(10):
        backoff.fail(0.0, random.Random(3))
    assert backoff.failures == 1 and backoff.until_s <= 1.5


def test_a_connection_that_broke_bans_for_less_than_no_connection():
    lost, dead = wiring("b0"), wiring("b0")
    lost.was_lost(lost.reserve(rows=ROWS, now_s=0), 0)
    dead.was_unreachable(dead.reserve(rows=ROWS, now_s=0), 0)
    assert lost.next_free_s(0) <= 1.5 < 2 <= dead.next_free_s(0)


def test_a_receipt_corrects_what_was_charged():
    wired = wiring("b0", "b1")
    first = {each.peer: each for each in (wired.reserve(rows=ROWS, now_s=0) for _ in range(2))}
    wired.receipt(first["b0"], 10.0)
    wired.receipt(first["b1"], 0.5)
    assert [wired.reserve(rows=ROWS, now_s=10).peer for _ in range(10)] == ["b1"] * 10
