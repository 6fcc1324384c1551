"""Trackers take numbers and harm nothing."""

import threading
import time

import pytest

from atoll.peer import tracking
from atoll.peer.tracking import MAX_WAITING, TrackError, check, tracked


class Writer:
    def __init__(self, *, fails_at=None):
        self.told, self.closed, self._fails_at = [], False, fails_at

    def write(self, step, numbers):
        if step == self._fails_at:
            raise SystemExit("no space left")
        self.told.append((step, dict(numbers)))

    def close(self):
        self.closed = True


def test_a_tracker_gets_the_numbers_that_are_known():
    writer = Writer()
    with tracked(["x"], name="attic", on_trouble=print, open_one=lambda *told: writer) as track:
        track(1, {"loss": 2.0, "valid_loss": None})
        track(2, {"loss": 1.5})
    assert writer.told == [(1, {"loss": 2.0}), (2, {"loss": 1.5})]
    assert writer.closed


def test_a_tracker_that_fails_is_told_once_and_left_alone():
    troubles, writer, sound = [], Writer(fails_at=2), Writer()
    writers = {"bad": writer, "good": sound}
    with tracked(
        ["bad", "good"], name="n", on_trouble=troubles.append, open_one=lambda t, n: writers[t]
    ) as track:
        for step in range(1, 6):
            track(step, {"loss": 1.0})
    assert [step for step, _ in writer.told] == [1]
    assert len(sound.told) == 5
    (trouble,) = troubles
    assert "--track bad failed and is left; the run goes on: SystemExit: no space left" in trouble


def test_a_tracker_that_cannot_be_opened_is_told():
    def refuse(told, name):
        raise OSError("no network")

    troubles = []
    with tracked(["x"], name="n", on_trouble=troubles.append, open_one=refuse) as track:
        track(1, {"loss": 1.0})
    assert "no network" in troubles[0]


def test_a_tracker_that_hangs_stops_nobody(monkeypatch):
    monkeypatch.setattr(tracking, "CLOSE_S", 0.05)
    hangs = threading.Event()

    class Hanging(Writer):
        def write(self, step, numbers):
            hangs.wait(0 if self.told else 3)
            super().write(step, numbers)

    writer, began_s = Hanging(), time.monotonic()
    with tracked(["x"], name="n", on_trouble=print, open_one=lambda *told: writer) as track:
        for step in range(4 * MAX_WAITING):
            track(step, {"loss": 1.0})
    assert time.monotonic() - began_s < 2
    hangs.set()


@pytest.mark.parametrize("told", ["", "tensorboard", "tensorboard:", "wandb:", "mlflow"])
def test_an_unknown_tracker_is_refused(told):
    with pytest.raises(TrackError, match="expected tensorboard:DIR, wandb or wandb:PROJECT"):
        check(told)


def test_tensorboard_reads_what_is_written(tmp_path):
    pytest.importorskip("tensorboard")
    with tracked([check(f"tensorboard:{tmp_path}")], name="a/b", on_trouble=pytest.fail) as track:
        track(3, {"loss": 1.25})
    (file,) = (tmp_path / "a-b").iterdir()
    assert b"loss" in file.read_bytes()
