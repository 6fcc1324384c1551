"""Shifts: they begin and end as the owner's rules say, and with the process."""

import threading

import pytest

from atoll.peer.daemon import process, shifts
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.process import RunOptions, Stop, train_in_shifts
from atoll.peer.daemon.shifts import Shifts
from support.environment import NOBODY
from support.organiser import LOOPBACK, tiny_spec, until

LOOK_S = 0.02


class Rule:
    """Says what the test says, and remembers what it was asked."""

    def __init__(self, why=""):
        self.why = why
        self.asked = []

    def why_not(self, *, is_training):
        self.asked.append(is_training)
        return self.why


@pytest.fixture
def rule(monkeypatch):
    monkeypatch.setattr(shifts, "LOOK_S", LOOK_S)
    return Rule()


class InThread:
    """`train_in_shifts` in a thread, and what it said."""

    def __init__(self, rule, invite=NOBODY, state_dir=None, **options):
        self.said, self.result, self.error = [], None, None
        self.stop = Stop()
        peer = PeerOptions(invite=invite, state_dir=state_dir, listen=LOOPBACK)
        self._options = RunOptions(peer=peer, device="cpu", yes=True, rules=(rule,), **options)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self.result = train_in_shifts(
                self._options, on_event=lambda event: self.said.append(event.text), stop=self.stop
            )
        except Exception as error:
            self.error = error

    def join(self):
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result

    def count(self, text):
        return sum(text in each for each in self.said)


def worker(monkeypatch, is_over=False):
    """Work that lasts until it is stopped; the list has an item for each time."""
    begun = []

    def work(options, *, on_event, stop, ask=None):
        begun.append(stop)
        stop.wait(60)
        return is_over

    monkeypatch.setattr(process, "join_and_train", work)
    return begun


def test_a_peer_leaves_when_a_rule_says_so_and_comes_back(rule, monkeypatch, tmp_path):
    begun = worker(monkeypatch)
    peer = InThread(rule, state_dir=tmp_path)
    until(lambda: len(begun) == 1, "the first shift")
    rule.why = "it is late"
    until(lambda: peer.count("not training: it is late"), "the end of it")
    assert begun[0].is_set()
    assert peer.count("leaving the run for now: it is late") == 1
    rule.why = ""
    until(lambda: len(begun) == 2, "the second shift")
    assert not begun[1].is_set()
    peer.stop.set()
    assert peer.join() is False
    assert begun[1].is_set()
    assert {True, False} == set(rule.asked)


def test_a_peer_waits_for_its_first_shift_and_says_why_once(rule, monkeypatch, tmp_path):
    begun, rule.why = worker(monkeypatch), "not yet"
    peer = InThread(rule, state_dir=tmp_path)
    until(lambda: len(rule.asked) > 3, "some looks")
    assert (begun, peer.said) == ([], ["not training: not yet"])
    peer.stop.set()
    assert peer.join() is False
    assert begun == []


def test_a_run_that_is_complete_ends_all_shifts(rule, monkeypatch, tmp_path):
    begun = worker(monkeypatch, is_over=True)
    peer = InThread(rule, state_dir=tmp_path)
    until(lambda: begun, "a shift")
    rule.why = "it is late"
    assert peer.join() is True
    assert len(begun) == 1


def test_a_failure_ends_all_shifts(rule, monkeypatch, tmp_path):
    def fail(options, **others):
        raise ValueError("no such run")

    monkeypatch.setattr(process, "join_and_train", fail)
    with pytest.raises(ValueError, match="no such run"):
        InThread(rule, state_dir=tmp_path).join()


def test_without_rules_nothing_watches():
    before = threading.active_count()
    with Shifts(rules=(), tell=print).watching(lambda: None) as closed:
        assert threading.active_count() == before
    assert not closed.is_set()


@pytest.mark.exhaustive
def test_a_peer_is_a_member_in_its_second_shift_too(rule, organise, tmp_path, network_threads):
    organiser = organise(tiny_spec(run={"rounds": 0}))
    peer = InThread(rule, organiser.invite, tmp_path / "peer", share=0.3)
    until(lambda: organiser.status().position >= 2, "two rounds")
    rule.why = "it is late"
    until(lambda: peer.count("not training"), "the end of the shift")
    status = organiser.status()
    assert [each.state for each in status.peers] == ["left"]
    rule.why = ""
    until(lambda: organiser.status().position >= status.position + 2, "further rounds")
    assert peer.count("inner optimizer and data position resumed") == 1
    assert len(organiser.status().peers) == 1
    peer.stop.set()
    assert peer.join() is False
