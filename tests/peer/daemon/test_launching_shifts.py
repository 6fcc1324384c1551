"""Ranks that their launcher ends and starts again as the owner's rules say."""

import os
import signal
import threading

import pytest

from atoll.peer.daemon import launching, shifts


@pytest.fixture
def crews(monkeypatch):
    """Crews that train until they are stopped."""
    made = []

    class Crew:
        def __init__(self, arguments, ranks, folder):
            self.ranks, self.signals, self._end = ranks, [], threading.Event()
            made.append(self)

        def stop(self, number):
            self.signals.append(number)
            self._end.set()

        def wait(self):
            assert self._end.wait(60)
            return [launching.OK] * self.ranks

    monkeypatch.setattr(launching, "Crew", Crew)
    monkeypatch.setattr(shifts, "LOOK_S", 0.02)
    return made


class Nights:
    """A rule that ends the first shift, and in the second one the launcher."""

    def __init__(self, crews):
        self.crews, self.pauses = crews, 0

    def why_not(self, *, is_training):
        if is_training and len(self.crews) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            return ""
        if not is_training and self.crews:
            self.pauses += 1
            return "it is day" if self.pauses < 3 else ""
        return "it is day" if is_training else ""


def test_a_launcher_starts_its_ranks_for_each_shift(crews):
    told = []
    rules = [Nights(crews)]
    code = launching.launch(["peer"], 2, on_event=lambda e: told.append(e.text), rules=rules)
    assert code == launching.OK
    assert [crew.signals for crew in crews] == [[signal.SIGTERM], [signal.SIGTERM]]
    assert told == ["leaving the run for now: it is day", "not training: it is day"]


def test_a_launcher_that_is_stopped_between_shifts_starts_nothing(crews):
    class Never:
        def why_not(self, *, is_training):
            os.kill(os.getpid(), signal.SIGTERM)
            return "never"

    code = launching.launch(["peer"], 2, on_event=lambda event: None, rules=[Never()])
    assert code == 128 + signal.SIGTERM
    assert crews == []
