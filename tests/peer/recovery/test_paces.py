"""Donors are compared by what a byte of theirs takes, and nobody is written off for good."""

import pytest

from atoll.peer.recovery import paces
from atoll.peer.recovery.paces import LEAST_BYTES, Paces

MIB = 1 << 20


def test_one_that_has_given_nothing_counts_as_the_fastest():
    some = Paces()
    assert some.of(["a", "b"]) == {"a": 1.0, "b": 1.0}
    some.gave("a", MIB, 4.0)
    some.gave("b", MIB, 1.0)
    found = some.of(["a", "b", "new"])
    assert found["new"] == found["b"] < found["a"]


def test_the_pace_is_that_of_a_byte():
    some = Paces()
    some.gave("a", MIB, 1.0)
    some.gave("b", 4 * MIB, 4.0)
    assert some.of(["a"])["a"] == pytest.approx(some.of(["b"])["b"])


def test_a_failure_makes_nobody_faster():
    some = Paces()
    some.failed("new", MIB, 0.1)  # refused at once
    some.gave("a", MIB, 8.0)
    assert some.of(["a", "new"]) == {"a": 8.0 / MIB, "new": 8.0 / MIB}
    some.failed("a", MIB, 0.1)
    assert some.of(["a"])["a"] == 8.0 / MIB
    some.failed("a", MIB, 60.0)
    assert some.of(["a"])["a"] == 60.0 / MIB


def test_who_fails_is_no_faster_than_the_others():
    some = Paces()
    some.gave("liar", MIB, 0.1)
    some.gave("a", MIB, 8.0)
    some.failed("liar", MIB, 0.1)
    assert len(set(some.of(["a", "liar"]).values())) == 1


def test_a_small_piece_tells_of_the_round_trip_alone():
    some = Paces()
    some.gave("a", 1, 0.1)
    some.gave("b", LEAST_BYTES, 0.1)
    assert len(set(some.of(["a", "b"]).values())) == 1


def test_failures_halve_with_what_comes():
    some = Paces()
    for _ in range(2):
        some.failed("a", MIB, 1.0)
    assert (some.failures("a"), some.failures("b")) == (2.0, 0.0)
    some.gave("a", MIB, 1.0)
    assert some.failures("a") < 1.0 + 1e-9


def test_one_of_three_times_the_pace_is_tried_after_32_pieces():
    some = Paces()
    some.gave("slow", MIB, 3.0)
    pieces = 0
    while some.of(["slow"])["slow"] > 1.0 / MIB:
        some.gave("fast", MIB, 1.0)
        pieces += 1
    assert pieces == 32  # then they are alike, and take turns


def test_who_was_away_for_long_is_forgiven():
    some = Paces()
    for _ in range(50):
        some.failed("away", MIB, 1.0)
    for _ in range(10):
        some.forgive()
    assert some.failures("away") < 0.1


def test_what_nobody_can_tell_apart_is_alike():
    some = Paces()
    some.gave("a", MIB, 0.0)
    some.gave("b", MIB, 1e-4)
    assert len(set(some.of(["a", "b"]).values())) == 1


def test_no_more_donors_are_kept_than_a_run_may_have(monkeypatch):
    monkeypatch.setattr(paces, "MAX_PACES", 3)
    some = Paces()
    some.gave("slow", MIB, 100.0)
    for name in "abc":
        some.gave(name, MIB, 1.0)
    assert some.of(["slow"])["slow"] == 1.0 and some.of("abc")["a"] < 1.0
