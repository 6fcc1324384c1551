"""Link use from counters."""

import pytest

from atoll.peer.daemon.reporting import Meter


def test_the_rate_is_held_against_the_declared_capacity():
    meter = Meter(80.0)
    assert meter.read(1_000_000, 10.0).use == 0.0
    assert meter.read(6_000_000, 11.0).use == pytest.approx(0.5)


def test_an_undeclared_capacity_is_the_highest_rate_seen():
    meter = Meter()
    meter.read(0, 0.0)
    assert meter.read(10_000_000, 1.0).capacity_mbit_s == pytest.approx(80.0)
    half = meter.read(15_000_000, 2.0)
    assert (half.capacity_mbit_s, half.use) == (pytest.approx(80.0), pytest.approx(0.5))


def test_readings_that_come_too_soon_change_nothing():
    meter = Meter(80.0)
    meter.read(0, 0.0)
    first = meter.read(5_000_000, 1.0)
    assert meter.read(9_000_000, 1.1) == first
    assert meter.read(10_000_000, 2.0).use == pytest.approx(0.5)


def test_more_than_the_declared_capacity_is_all_of_it():
    meter = Meter(8.0)
    meter.read(0, 0.0)
    assert meter.read(100_000_000, 1.0).use == 1.0


def test_a_peer_that_only_sends_heartbeats_does_not_fill_its_link():
    meter = Meter()
    meter.read(0, 0.0)
    quiet = meter.read(5_000, 1.0)
    assert (quiet.capacity_mbit_s, quiet.use) == (0.0, 0.0)
    assert meter.read(1_255_000, 2.0).capacity_mbit_s == pytest.approx(10.0)
    assert meter.read(1_255_000 + 12_500, 3.0).use == pytest.approx(0.01)
