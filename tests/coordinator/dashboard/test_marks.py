from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.dashboard.marks import bar, legend, ordered_phases, shares, spark, stacked


def test_bar_has_half_cell_steps_and_clamps():
    assert bar(0.0, 4).plain == "────"
    assert bar(0.5, 4).plain == "━━──"
    assert bar(0.625, 4).plain == "━━╸─"
    assert bar(7.0, 4).plain == "━━━━"
    assert bar(None, 4).plain == "────"
    assert bar(float("nan"), 4).plain == "────"


def test_a_little_is_not_nothing():
    assert bar(0.001, 4).plain == "╸───"


@given(st.lists(st.floats(0, 1e6), max_size=8), st.integers(0, 100))
def test_shares_fill_the_width(values, width):
    cells = shares(values, width)
    assert len(cells) == len(values)
    assert sum(cells) == (width if sum(values) > 0 else 0)
    assert all(n >= 0 for n in cells)


def test_phases_come_in_the_order_in_which_they_happen():
    seconds = {"apply": 1.0, "novel": 0.5, "wait": 2.0, "send": 0.0, "encode": float("nan")}
    assert ordered_phases(seconds) == [("wait", 2.0), ("apply", 1.0), ("novel", 0.5)]


def test_stacked_bar_uses_the_colours_of_the_phases():
    content = stacked({"wait": 1.0, "send": 3.0}, 8)
    assert content.plain == "■" * 8
    assert [(s.start, s.end, s.style) for s in content.spans] == [
        (0, 2, "$phase-wait"),
        (2, 8, "$phase-send"),
    ]


def test_stacked_bar_on_a_longer_scale_leaves_track():
    assert stacked({"wait": 1.0}, 8, scale_s=2.0).plain == "■■■■────"
    assert stacked({}, 4).plain == "────"


def test_legend_names_phases_with_seconds():
    assert legend({"send": 0.5, "wait": 0.25}).plain == "■ wait 0.25s  ■ send 0.50s  "


def test_spark_runs_from_lowest_to_highest():
    assert spark([1, 2, 3, float("inf")], 8).plain == "▁▅█"
    assert spark([], 8).plain == ""
    assert spark([5, 5], 8).plain == "▁▁"
