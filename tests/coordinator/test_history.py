"""The log of events for people: who comes and goes is in it once, in the order of time."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.history import EventLog, History
from atoll.coordinator.presence import Presence
from atoll.coordinator.run.status import Event, PeerStatus

NOW_S = 10_000.0


@pytest.fixture
def desk(tmp_path: Path) -> Any:
    """Presence and events over one history, as before and after a reboot."""
    history = History(tmp_path / "history.db")

    def boot() -> tuple[Presence, EventLog]:
        events = EventLog(history, lambda: NOW_S)
        return Presence(history, events, 0.0), events

    return boot


def test_events_that_arrive_late_stand_where_they_belong(desk: Any) -> None:
    _, events = desk()
    events.report("info", "started")
    events.add("warning", "a", "no quorum", at_s=NOW_S - 60)
    events.add("warning", "b", "no quorum", at_s=NOW_S - 30)
    assert [event.source for event in events.newest()] == ["a", "b", "coordinator"]


def test_a_damaged_event_hides_no_other_one(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    for at_s in (1.0, 2.0, 3.0):
        history.add_event(Event(at=at_s, level="info", source="a", text=f"at {at_s}"))
    with closing(sqlite3.connect(tmp_path / "history.db")) as db, db:
        db.execute("UPDATE events SET record = ? WHERE id = 2", (b'{"at": \xff',))
    assert [event.at for event in history.events(9)] == [1.0, 3.0]
    assert [event.at for event in history.events(9, until_s=2.5)] == [1.0]


def test_a_peer_that_joins_again_after_a_reboot_is_logged_once(desk: Any) -> None:
    status = PeerStatus(peer_id="a", incarnation="1")
    before, _ = desk()
    before.report(status, 1.0, leaving=False)
    before.save()
    after, events = desk()
    events.add("info", "a", "joined as trainer (version 1)")
    after.note_joined("a")
    after.report(status, 2.0, leaving=False)
    assert [event.text for event in events.newest()] == ["joined as trainer (version 1)"]
    after.look(100.0)
    after.report(status, 101.0, leaving=False)  # silent for a while, in the same session
    assert events.newest()[-1].text == "is back"


def test_a_goodbye_is_logged_once(desk: Any) -> None:
    presence, events = desk()
    presence.report(PeerStatus(peer_id="a", incarnation="1"), 1.0, leaving=False)
    for _ in range(2):
        presence.report(PeerStatus(peer_id="a", incarnation="1"), 2.0, leaving=True)
    assert [event.text for event in events.newest()] == ["left"]
