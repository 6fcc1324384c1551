"""Donors are compared by what a byte of theirs takes, and nobody is written off for good."""

import pytest

from atoll.peer.recovery import paces
from atoll.peer.recovery.paces import Paces


def test_one_that_has_given_nothing_counts_as_the_fastest():
    some = Paces()
    assert some.of(["a", "b"]) == {"a": 1.0, "b": 1.0}
    some.note("a", 1000, 4.0)
    some.note("b", 1000, 1.0)
    found = some.of(["a", "b", "new"])
    assert found["new"] == found["b"] < found["a"]


def test_the_pace_is_that_of_a_byte():
    some = Paces()
    some.note("a", 1000, 1.0)
    some.note("b", 4000, 4.0)
    assert some.of(["a"])["a"] == pytest.approx(some.of(["b"])["b"])


def test_a_failure_makes_nobody_faster():
    some = Paces()
    some.note("a", 1000, 8.0)
    some.note_failure("a", 1000, 0.1)  # refused at once
    assert some.of(["a"])["a"] == pytest.approx(8e-3)
    some.note_failure("a", 1000, 60.0)
    assert some.of(["a"])["a"] == pytest.approx(60e-3)


def test_what_was_long_ago_counts_little():
    some = Paces()
    some.note("slow", 1000, 50.0)
    for _ in range(100):
        some.note("fast", 1000, 1.0)
    found = some.of(["fast", "slow"])
    assert found["fast"] < found["slow"] < 1.1 * found["fast"]


def test_what_nobody_can_tell_apart_is_alike():
    some = Paces()
    some.note("a", 1000, 0.0)
    some.note("b", 1000, 1e-4)
    assert len(set(some.of(["a", "b"]).values())) == 1


def test_no_more_donors_are_kept_than_a_run_may_have(monkeypatch):
    monkeypatch.setattr(paces, "MAX_PACES", 3)
    some = Paces()
    some.note("slow", 1000, 100.0)
    for name in "abc":
        some.note(name, 1000, 1.0)
    assert some.of(["slow"])["slow"] == 1.0 and some.of("abc")["a"] < 1.0
