"""Donors are compared by what a byte of theirs takes, and nobody is written off for good."""

import pytest

from atoll.peer.recovery import paces
from atoll.peer.recovery.paces import Paces


def test_one_that_has_given_nothing_counts_as_the_fastest():
    some = Paces()
    assert some.of(["a", "b"]) == {"a": 1.0, "b": 1.0}
    some.gave("a", 1000, 4.0)
    some.gave("b", 1000, 1.0)
    found = some.of(["a", "b", "new"])
    assert found["new"] == found["b"] < found["a"]


def test_the_pace_is_that_of_a_byte():
    some = Paces()
    some.gave("a", 1000, 1.0)
    some.gave("b", 4000, 4.0)
    assert some.of(["a"])["a"] == pytest.approx(some.of(["b"])["b"])


def test_a_failure_makes_nobody_faster():
    some = Paces()
    some.failed("new", 1000, 0.1)  # refused at once
    some.gave("a", 1000, 8.0)
    assert some.of(["a", "new"]) == {"a": 8e-3, "new": 8e-3}
    some.failed("a", 1000, 0.1)
    assert some.of(["a"])["a"] == 8e-3
    some.failed("a", 1000, 60.0)
    assert some.of(["a"])["a"] == 60e-3


def test_failures_halve_with_what_comes():
    some = Paces()
    for _ in range(2):
        some.failed("a", 1000, 1.0)
    assert (some.failures("a"), some.failures("b")) == (2.0, 0.0)
    some.gave("a", 1000, 1.0)
    assert some.failures("a") < 1.0 + 1e-9


def test_what_was_long_ago_counts_little():
    some = Paces()
    some.gave("slow", 1000, 50.0)
    for _ in range(100):
        some.gave("fast", 1000, 1.0)
    found = some.of(["fast", "slow"])
    assert found["fast"] < found["slow"] < 1.1 * found["fast"]


def test_who_was_away_for_long_is_forgiven():
    some = Paces()
    for _ in range(50):
        some.failed("away", 1000, 1.0)
    for _ in range(10):
        some.forgive()
    assert some.failures("away") < 0.1


def test_what_nobody_can_tell_apart_is_alike():
    some = Paces()
    some.gave("a", 1000, 0.0)
    some.gave("b", 1000, 1e-4)
    assert len(set(some.of(["a", "b"]).values())) == 1


def test_no_more_donors_are_kept_than_a_run_may_have(monkeypatch):
    monkeypatch.setattr(paces, "MAX_PACES", 3)
    some = Paces()
    some.gave("slow", 1000, 100.0)
    for name in "abc":
        some.gave(name, 1000, 1.0)
    assert some.of(["slow"])["slow"] == 1.0 and some.of("abc")["a"] < 1.0
