"""What a peer says when it stops, and of its first round."""

import gc
import math
import threading
import weakref
from types import SimpleNamespace

import pytest

from atoll.coordinator.run.invite import Invite
from atoll.peer import notices
from atoll.peer.daemon import process
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.process import (
    STORED_S,
    STORING_S,
    Narrator,
    RunOptions,
    Stop,
    join_and_train,
    saying_that_it_stops,
    wait_until_stored,
)
from atoll.peer.daemon.views import PeerView
from atoll.peer.training.statistics import TimeSpent, TrainerStatistics


def test_a_stop_is_answered_at_once_and_once():
    stop, told, is_told = Stop(), [], threading.Event()

    def take(event):
        told.append(event.text)
        is_told.set()

    with saying_that_it_stops(stop, take):
        stop.set()
        assert is_told.wait(10)
        stop.set()
    assert told == [notices.stopping()]


def test_a_run_that_ends_by_itself_says_nothing_of_a_stop():
    told = []
    with saying_that_it_stops(Stop(), told.append):
        pass
    assert told == []


def test_a_wait_for_the_coordinator_is_not_silent(monkeypatch):
    monkeypatch.setattr(process, "SAY_STORING_S", 0.0)
    told = []
    stopping = threading.Event()
    stores = SimpleNamespace(stored_all=lambda: False, storing=lambda: False)
    assert not wait_until_stored(stores, 0.01, stopping, lambda level, text: told.append(text))
    assert told == [
        "waiting for the coordinator to store all rounds, and no longer than 0.01 s while it takes "
        "none",
        "the coordinator has not stored the last rounds; they are kept here",
    ]


class Sends:
    """Sends for a while, as the clock of the test goes, and has all stored then or never."""

    def __init__(self, monkeypatch, *, sends_s, stored_s=math.inf):
        self.now_s, self._sends_s, self._stored_s = 0.0, sends_s, stored_s
        monkeypatch.setattr(process.time, "monotonic", lambda: self.now_s)

    def stored_all(self):
        self.now_s += 1.0
        assert self.now_s < 2 * STORING_S
        return self.now_s > self._stored_s

    def storing(self):
        return self.now_s <= self._sends_s


@pytest.mark.parametrize(
    ("sends_s", "stored_s", "waited_s"),
    [(400.0, 401.0, 402.0), (400.0, math.inf, 461.0), (math.inf, math.inf, STORING_S + 1)],
)
def test_a_long_upload_is_waited_for_but_not_for_ever(monkeypatch, sends_s, stored_s, waited_s):
    """A gigabyte takes minutes on many lines, and a coordinator may take it without an end."""
    sends = Sends(monkeypatch, sends_s=sends_s, stored_s=stored_s)
    monkeypatch.setattr(process, "STORED_POLL_S", 0.0)
    is_stored = wait_until_stored(sends, STORED_S, threading.Event(), lambda level, text: None)
    assert is_stored == math.isfinite(stored_s)
    assert sends.now_s == waited_s


def test_the_reason_comes_before_the_goodbye(monkeypatch, tmp_path):
    invite = Invite(
        addresses=("127.0.0.1:1",), run_id=bytes(32), run_key=bytes(32), tls_sha256=bytes(32)
    )
    facts = SimpleNamespace(is_keeper=True, module="")
    network = SimpleNamespace(facts=facts, view=PeerView(position=7), close=lambda: None)
    monkeypatch.setattr(process, "NetworkProcess", lambda *_, **__: network)

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(process, "_keep", fail)
    events = []
    options = RunOptions(peer=PeerOptions(invite=invite, state_dir=tmp_path / "peer"))
    (tmp_path / "peer").mkdir()
    with pytest.raises(OSError, match="no space"):
        join_and_train(options, on_event=events.append, stop=Stop())
    last = events[-1]
    assert (last.kind, last.level, last.position) == ("stopped", "error", 7)
    assert last.text == "left the run: no space left on device"


@pytest.mark.parametrize(
    ("spent", "shown"),
    [(TimeSpent(), "util -"), (TimeSpent(total_s=10.0, train_s=9.0), "util 90.0%")],
)
def test_a_first_round_has_no_utilisation(spent, shown):
    events = []
    narrator = Narrator(events.append)
    statistics = TrainerStatistics(spent=spent, loss=math.nan)
    trainer = SimpleNamespace(statistics=lambda: statistics, rounds=8)
    narrator.on_account(trainer, SimpleNamespace(position=1, verdict="counted"))
    (event,) = events
    assert shown in event.text.replace("\u2013", "-").replace("\u2014", "-")
    assert event.utilisation == (spent.train_s / 10.0 if spent.total_s else None)


def test_a_stop_ends_its_part_and_keeps_nothing_of_it():
    class Trainer:
        def __init__(self):
            self.model = bytearray(8)

        def stop(self):
            ended.append(len(self.model))

    stop, ended, trainer = Stop(), [], Trainer()
    held = weakref.ref(trainer)
    with stop.part() as stage:
        stage.call(trainer.stop)
        del trainer
        stage.set()
        assert ended == [8]
        assert not stop.is_set()  # the peer goes on in another stage
    del stage
    gc.collect()
    assert held() is None
    with stop.part() as stage:
        stop.set()
        assert stage.is_set()
    with stop.part() as late:
        assert late.is_set()
