"""Admissions that are renewed, under a clock of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.coordinator.entrance import Entrance
from atoll.coordinator.history import History
from atoll.coordinator.journal import Journal
from atoll.coordinator.members import MAX_MEMBERS
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
def entrance(tmp_path: Path, clock: Clock) -> Entrance:
    return Entrance(
        CoordinatorSection(admission_hours=1.0),
        RunKeys.generate(),
        b"r" * 32,
        verify=verify,
        journal=Journal(History(tmp_path / "history.db"), clock),
        clock=clock,
        steady=clock,
    )


def test_an_admission_is_renewed_at_half_its_life(entrance: Entrance, clock: Clock) -> None:
    entrance.admit("peer", "trainer")
    clock.now_s += 1799
    assert entrance.renewed("peer", "trainer") == b""
    clock.now_s += 2
    assert entrance.renewed("peer", "trainer")
    assert entrance.renewed("peer", "trainer") == b""


def test_any_number_of_peers_that_came_once_takes_bounded_memory(entrance: Entrance) -> None:
    """Whose admission was forgotten gets another one, once."""
    entrance.admit("first", "trainer")
    for index in range(2 * MAX_MEMBERS + 1):
        entrance.admit(f"passer-by {index}", "trainer")
    assert entrance.renewed("first", "trainer")
    assert entrance.renewed("first", "trainer") == b""
