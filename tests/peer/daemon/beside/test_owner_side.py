"""The owner's side opens text and model for the trainer while the state of the run comes."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.peer.daemon.beside import owner_side
from atoll.peer.daemon.beside.owner_side import OwnerSide
from atoll.peer.errors import DataError

SPEC = RunSpec.from_dict({"run": {"name": "small"}, "model": {"preset": "nano"}})
LAYOUT = Layout.of(nn.Linear(2, 2)).to_json()


@pytest.fixture(autouse=True)
def imports_nothing(monkeypatch):
    monkeypatch.setattr(owner_side, "IMPORTS", ())


def admitted(open_run, *, module="", is_keeper=False, needs_tokenizer=False, make_first=None):
    """Return the side of an owner who has agreed."""
    consent = SimpleNamespace(
        admit=lambda terms: needs_tokenizer, expect_tokenizer=lambda terms: None
    )
    side = OwnerSide(consent, make_first or (lambda spec, module: None), open_run)
    asked = side.admit(SPEC.canonical(), LAYOUT, module, is_keeper)
    assert asked is needs_tokenizer
    return side


def test_a_run_is_opened_in_another_thread_and_taken_once():
    threads = []

    def open_run(spec):
        threads.append(threading.current_thread())
        return spec

    side = admitted(open_run)
    assert side.take_opened() == SPEC and side.take_opened() is None
    assert threads != [threading.main_thread()] and len(threads) == 1


@pytest.mark.parametrize("error", [DataError("no such text"), RuntimeError("a model's own")])
def test_what_cannot_be_opened_is_left_to_the_trainer(error):
    def open_run(spec):
        raise error

    assert admitted(open_run).take_opened() is None


@pytest.mark.parametrize("terms", [{"is_keeper": True}, {"module": "stage-1"}])
def test_a_keeper_or_a_stage_opens_no_whole_model(terms):
    opened = []
    assert admitted(opened.append, **terms).take_opened() is None
    assert opened == []


def test_a_run_is_not_opened_before_its_tokenizer_has_come():
    opened = []
    side = admitted(opened.append, needs_tokenizer=True)
    assert side._ahead is None
    side.expect_tokenizer()
    side.take_opened()
    assert opened == [SPEC]


def test_nothing_is_opened_until_the_state_is_asked_for(monkeypatch):
    """Until then the other process needs the cores."""
    monkeypatch.setattr(owner_side, "AHEAD_S", 60.0)
    opened = threading.Event()
    side = admitted(lambda spec: opened.set())
    assert not opened.wait(0.05)
    side.note_recovery()
    assert opened.wait(20)


def test_a_run_is_opened_soon_though_nothing_is_asked_for(monkeypatch):
    monkeypatch.setattr(owner_side, "AHEAD_S", 0.01)
    opened = threading.Event()
    admitted(lambda spec: opened.set())
    assert opened.wait(20)


def test_the_first_state_is_not_built_beside_the_model():
    """Both draw from torch's one random state, and the first state is compared by its bits."""
    order, hold = [], threading.Event()

    def open_run(spec):
        assert hold.wait(20)
        order.append("model")

    def make_first(spec, module):
        order.append("state")
        zeros = torch.zeros(6)
        return SimpleNamespace(layout=Layout.of(nn.Linear(2, 2)), params_N=zeros, memory_M=zeros)

    side = admitted(open_run, make_first=make_first)
    threading.Timer(0.05, hold.set).start()
    side.first_state("")
    assert order == ["model", "state"]
