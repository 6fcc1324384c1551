"""Hours of the day, over midnight and over the changes of the clock."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from atoll.peer.daemon.hours import Hours, HoursRule

BERLIN = ZoneInfo("Europe/Berlin")


def at(time):
    return datetime.strptime(f"2026-11-27 {time}", "%Y-%m-%d %H:%M")


def open_hours(text, start, hours=24):
    """The local times, half an hour apart, at which a peer trains."""
    spans, now = Hours.read(text), start.astimezone(UTC)
    steps = (now + timedelta(minutes=30 * step) for step in range(2 * hours))
    local = (each.astimezone(BERLIN) for each in steps)
    return [f"{each:%H:%M}" for each in local if spans.holds(each)]


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22-8", ["22:00", "23:59", "00:00", "07:59"], ["08:00", "12:00", "21:59"]),
        ("9-17", ["09:00", "16:59"], ["08:59", "17:00", "00:00"]),
        ("9:30-12,14-18", ["09:30", "11:59", "14:00"], ["09:29", "12:00", "13:59", "18:00"]),
        ("0-24", ["00:00", "12:00", "23:59"], []),
        ("22-22", ["21:59", "22:00"], []),
        (" 20 - 24 ", ["20:00", "23:59"], ["00:00", "19:59"]),
    ],
)
def test_hours_hold_from_their_beginning_until_their_end(text, inside, outside):
    hours = Hours.read(text)
    assert [time for time in inside if not hours.holds(at(time))] == []
    assert [time for time in outside if hours.holds(at(time))] == []


@pytest.mark.parametrize(
    "text", ["", "22", "22-", "-8", "22-25", "22:60-8", "24:30-8", "ten-six", "22-8-9", "22-8,"]
)
def test_hours_without_sense_are_refused(text):
    with pytest.raises(ValueError, match="expected hours such as 22-8"):
        Hours.read(text)


def test_hours_without_end_are_refused():
    with pytest.raises(ValueError, match="at most 24 spans"):
        Hours.read(",".join(["1-2"] * 25))


def test_the_next_beginning_is_told():
    hours = Hours.read("22-8,12:30-13")
    told = [hours.next_begin(at(time)) for time in ("09:00", "12:30", "13:00", "23:00")]
    assert told == ["12:30", "22:00", "22:00", "12:30"]
    rule = HoursRule(hours, lambda: at("09:00"))
    assert rule.why_not(is_training=True).endswith("joins at 12:30")
    assert HoursRule(hours, lambda: at("23:00")).why_not(is_training=False) == ""


def test_an_hour_that_the_clock_skips_is_skipped():
    night = datetime(2026, 3, 29, 0, 0, tzinfo=BERLIN)  # 2:00 becomes 3:00
    assert open_hours("1-4", night, hours=6) == ["01:00", "01:30", "03:00", "03:30"]
    assert open_hours("2:30-4", night, hours=6) == ["03:00", "03:30"]


def test_an_hour_that_comes_twice_counts_twice():
    night = datetime(2026, 10, 25, 0, 0, tzinfo=BERLIN)  # 3:00 becomes 2:00
    assert open_hours("2-4", night, hours=6) == [*["02:00", "02:30"] * 2, "03:00", "03:30"]
    assert open_hours("22-2:30", night, hours=6)[-2:] == ["02:00", "02:00"]
