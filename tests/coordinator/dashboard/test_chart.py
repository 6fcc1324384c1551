import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.dashboard.chart import (
    Canvas,
    Scale,
    Series,
    plot,
    scale_of,
    smoothed,
    spaced,
    thinned,
    ticks,
)

FALLING = [(float(i), 5.0 * math.exp(-i / 10) + 1) for i in range(1, 41)]


def test_a_cell_holds_eight_dots():
    canvas = Canvas(1, 1)
    for x in range(2):
        for y in range(4):
            canvas.dot(x, y, "a")
    assert canvas.row(0) == [("⣿", "a")]


def test_dots_outside_are_ignored():
    canvas = Canvas(1, 1)
    canvas.line((-50, -50), (50, 50), "a")
    assert canvas.row(0)[0][0] in "⡳⢝⠳⣟⡕⠑⢑⡑⣑⠡⠕⢅"


def test_plot_is_as_large_as_asked_and_falls_from_left_to_right():
    lines = plot([Series(points=FALLING, style="x")], 60, 12).plain.split("\n")
    assert len(lines) == 12
    assert max(len(line) for line in lines) <= 60
    plotted = [line[7:] for line in lines[:10]]
    first, last = plotted[0], plotted[-1]
    assert first.strip() and first.index(first.strip()) == 0
    assert last.rstrip() == last and len(last) == 53


def test_ticks_are_labelled():
    lines = plot([Series(points=FALLING, style="x")], 60, 12).plain.split("\n")
    labels = [line[:5].strip() for line in lines if "┤" in line]
    assert labels == ["5.0", "4.0", "3.0", "2.0", "1.0"]
    assert lines[-1].split() == ["10", "20", "30", "40"]


def test_rounds_are_labelled_by_all_their_digits():
    points = [(1000.0 + i, 2.0) for i in range(500)]
    last = plot([Series(points=points, style="x")], 60, 12).plain.split("\n")[-1]
    assert last.split()[:2] == ["1000", "1200"]


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show():
    points = [(1.0, 4.0), (2.0, 0.0), (3.0, -1.0), (4.0, 2.0), (5.0, float("nan"))]
    lines = plot([Series(points=points, style="x")], 40, 12, log=True).plain.split("\n")
    assert len(lines) == 12
    assert any("2.0 ┤" in line for line in lines)


@pytest.mark.parametrize("size", [(0, 0), (8, 3), (10, 2), (-5, -5)])
def test_no_room_draws_nothing(size):
    assert plot([Series(points=FALLING, style="x")], *size).plain == ""


def test_nothing_to_draw_draws_nothing():
    assert plot([Series(points=[], style="x")], 40, 10).plain == ""


@given(st.lists(st.floats(allow_nan=True), max_size=40), st.booleans())
def test_any_losses_can_be_drawn(values, log):
    points = [(float(i), value) for i, value in enumerate(values)]
    content = plot([Series(points=points, style="x")], 40, 10, log=log)
    assert all(len(line) <= 40 for line in content.plain.split("\n"))


def test_smoothing_does_not_lag_behind_a_straight_fall():
    points = [(float(i), 10.0 - 0.1 * i) for i in range(50)]
    assert [y for _, y in smoothed(points)] == pytest.approx([y for _, y in points])


def test_smoothing_removes_noise():
    points = [(float(i), 2.0 + (-1) ** i) for i in range(100)]
    assert all(abs(y - 2.0) < 0.45 for _, y in smoothed(points))


def test_smoothing_survives_equal_positions():
    assert smoothed([(1.0, 3.0), (1.0, 5.0)]) == [(1.0, 3.0), (1.0, 5.0)]


def test_thinning_keeps_a_spike():
    points = [(float(i), 1.0) for i in range(10_000)]
    points[4321] = (4321.0, 99.0)
    few = thinned(points, 100)
    assert len(few) <= 100
    assert (4321.0, 99.0) in few
    assert few == sorted(few)


def test_spaced_points_end_with_the_newest():
    points = [(float(i), 1.0) for i in range(1, 11)]
    assert [x for x, _ in spaced(points, 3)] == [10.0, 6.0, 2.0]
    assert spaced(points, 100) == points[::-1]
    assert spaced(points, 0) == points[-1:]
    assert spaced([], 3) == []


def test_dots_for_every_round_leave_the_curve_under_them_in_sight():
    curve = Series(points=FALLING, style="line")
    dots = Series(points=FALLING, style="dot", dots=True)
    content = plot([curve, dots], 60, 12)
    drawn = Counter(span.style for span in content.spans if span.style in ("line", "dot"))
    assert 0 < drawn["dot"] < drawn["line"]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(1, 10))
def test_ticks_lie_inside_and_are_few(low, span, num_max):
    scale = Scale(low=low, high=low + span)
    found = ticks(scale, num_max)
    assert len(found) <= num_max
    assert all(scale.low - 1e-6 * span <= tick <= scale.high + 1e-6 * span for tick in found)


def test_one_value_still_has_a_scale():
    scale = scale_of([3.0], log=False)
    assert scale.low < 3.0 < scale.high
    scale = scale_of([3.0], log=True)
    assert scale.low < 3.0 < scale.high
