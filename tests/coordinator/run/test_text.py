import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.run import text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, "1.00k"),
        (1000, "1.00k"),
        (12_345, "12.3k"),
        (99_960, "100k"),
        (999_700, "1.00M"),
        (4.56e6, "4.56M"),
        (0.5, "0.50"),
        (1e21, "1000000P"),
        (None, text.ABSENT),
        (float("nan"), text.ABSENT),
        (float("inf"), text.ABSENT),
    ],
)
def test_counts_are_short(value, expected):
    assert text.count(value) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.04, "0.0s"),
        (0.44, "0.4s"),
        (9.96, "10s"),
        (59.6, "1m 00s"),
        (200, "3m 20s"),
        (3599.7, "1h 00m"),
        (3840, "1h 04m"),
        (266_400, "3d 02h"),
        (-5, "0.0s"),
        (None, text.ABSENT),
    ],
)
def test_durations_have_two_units_at_most(seconds, expected):
    assert text.duration(seconds) == expected


def test_sizes_are_decimal():
    assert [text.size(n) for n in (0, 812, 1_060_000, 12_345_678_901)] == [
        "0 B",
        "812 B",
        "1.06 MB",
        "12.3 GB",
    ]


def test_percent_and_loss():
    assert text.percent(0.9644, decimals=1) == "96.4%"
    assert text.percent(float("nan")) == text.ABSENT
    assert text.loss_text(1.23456) == "1.235"
    assert text.loss_text(123456.0) == "1.23e5"
    assert [text.loss_text(x) for x in (1e300, -1.7e300, 123.4)] == ["1e300", "-2e300", "123"]


@given(st.text())
def test_clean_leaves_nothing_that_steers_a_terminal(raw):
    safe = text.clean(raw)
    assert safe.isprintable() or all(c.isprintable() or c.isspace() for c in safe)
    assert not set(safe) & set("\x1b\x07\x08\r\n\x9b\u202e\u2066\u200b")


def test_clean_cuts_what_is_long():
    assert text.clean("x" * 10_000, num_max=20) == "x" * 20 + "…"


@given(st.text(), st.integers(0, 30))
def test_fit_is_exactly_as_wide_as_asked(raw, width):
    assert text.cells(text.fit(text.clean(raw), width)) == width


def test_an_absurd_time_stamp_is_dashes():
    assert text.clock_time(1e300) == "--:--:--"
    assert text.clock_time(None) == "--:--:--"
    assert text.clock_time(float("nan")) == "--:--:--"


def test_short_id_keeps_the_end_where_keys_of_one_kind_differ():
    assert text.short_id("12D3KooWabcdefghijkl") == "…ghijkl"
    assert text.short_id("coordinator") == "coordinator"
