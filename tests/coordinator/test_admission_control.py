"""Admissions that are renewed, under a clock of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.coordinator.admission_control import AdmissionControl
from atoll.coordinator.history import EventLog, History
from atoll.coordinator.invites import InviteDesk
from atoll.coordinator.presence import MAX_PEERS
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.run.sections import CoordinatorSection
from atoll.dht import verify


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def admission(tmp_path: Path, clock: Clock) -> AdmissionControl:
    keys = RunKeys.generate()
    return AdmissionControl(
        CoordinatorSection(admission_hours=1.0),
        keys,
        b"r" * 32,
        desk=InviteDesk(tmp_path, keys.token),
        verify=verify,
        events=EventLog(History(tmp_path / "history.db"), clock),
        clock=clock,
        steady=clock,
    )


def test_an_admission_is_renewed_at_half_its_life(
    admission: AdmissionControl, clock: Clock
) -> None:
    admission.admit("peer", "trainer")
    clock.now_s += 1799
    assert admission.renewed("peer", "trainer") == b""
    clock.now_s += 2
    assert admission.renewed("peer", "trainer")
    assert admission.renewed("peer", "trainer") == b""


def test_any_number_of_peers_that_came_once_takes_bounded_memory(
    admission: AdmissionControl,
) -> None:
    """A peer whose admission was forgotten gets another one, once."""
    admission.admit("first", "trainer")
    for index in range(2 * MAX_PEERS + 1):
        admission.admit(f"passer-by {index}", "trainer")
    assert admission.renewed("first", "trainer")
    assert admission.renewed("first", "trainer") == b""
