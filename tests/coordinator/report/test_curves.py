"""The curves of a report."""

from dataclasses import replace

import pytest

from atoll.coordinator.report.curves import MAX_POINTS, curves, thinned
from support.status import make_round


def rounds(count):
    return [make_round(p, num_peers=3, left_out=[]) for p in range(1, count + 1)]


def test_few_points_stay_as_they_are_but_for_those_that_are_no_numbers():
    points = [(0.0, 1.0), (1.0, float("nan")), (2.0, 3.0)]
    assert thinned(points) == [(0.0, 1.0), (2.0, 3.0)]


def test_many_points_become_means_of_neighbours():
    assert thinned([(float(i), 2.0 * i) for i in range(6)], 3) == [(0.5, 1.0), (2.5, 5.0), (4.5, 9)]


def test_no_curve_has_more_points_than_can_be_seen():
    found = curves(rounds(MAX_POINTS * 3 + 1))
    assert len(found) == 5
    assert max(len(line.points) for curve in found for line in curve.lines) <= MAX_POINTS


def test_a_round_that_was_learned_late_has_no_place_in_time():
    rows = rounds(6)
    rows[2] = replace(rows[2], late=True, at=rows[5].at)
    by_tokens, by_time, speed = curves(rows)[:3]
    assert [len(curve.lines[0].points) for curve in (by_tokens, by_time, speed)] == [6, 5, 3]


def test_hours_count_from_the_first_round():
    rows = rounds(2)
    (_, (hours, _)) = curves(rows)[1].lines[0].points
    assert hours == pytest.approx((rows[1].at - rows[0].at) / 3600)
