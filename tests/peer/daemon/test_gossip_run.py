"""The trainer's seam to meetings: what is counted, what stays, and what a restart takes up."""

import queue
import threading
import types
from contextlib import nullcontext

import pytest
import torch

from atoll.dht.testing.virtualtime import inline
from atoll.optim import methods
from atoll.optim.log.entry import Elector
from atoll.optim.reducer import Contribution
from atoll.optim.state.layout import Layout, LayoutError
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon.gossip_run import GossipReducer
from atoll.peer.daemon.loop_thread import LoopThread
from atoll.peer.daemon.reducer import TrainerProgress
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.engine import GossipSettled
from atoll.peer.rounds.context import RoundSettings, RoundTrace

LAYOUT = Layout(names=("w",), shapes=((50,),))


class Meetings:
    """A gossip that settles as it is told, in a loop of its own thread."""

    def __init__(self, position=0):
        self.state = OuterState.genesis(LAYOUT, torch.arange(50.0)).at(position)
        self.offered, self.installed = [], []
        self.on_offer = lambda window: None

    def offer(self, window):
        self.offered.append(window)
        self.on_offer(window)

    def install(self, state):
        self.state = state
        self.installed.append(state.position)


@pytest.fixture
def seam():
    """Makes reducers on a running loop."""
    thread = LoopThread(nullcontext())

    def make(position=0, *, is_borrowed=False, rounds=0, patience_s=10.0, company=None):
        events = []
        ctx = GossipContext(
            me=Elector(peer_id="me", incarnation="1"),
            run_id=b"r" * 32,
            transport=None,
            roster=None,
            method=methods.parse("noloco"),
            layout=LAYOUT,
            settings=RoundSettings(stall_s=1.0, grace_s=1.0),
            compute=inline,
            on_event=lambda level, text, key=None: events.append(text),
        )
        meetings, commits = Meetings(position), []
        spec = types.SimpleNamespace(
            run=types.SimpleNamespace(rounds=rounds), outer=types.SimpleNamespace(inner_steps=4)
        )
        settled = queue.SimpleQueue()
        reducer = GossipReducer(
            thread,
            ctx,
            meetings,
            TrainerProgress(spec, ctx.method, 1),
            settled,
            is_borrowed=is_borrowed,
            patience_s=patience_s,
            company=company,
        )
        params_N = reducer.start(LAYOUT, torch.zeros(50), commits.append)
        assert torch.equal(params_N, meetings.state.params_N)
        return types.SimpleNamespace(
            reducer=reducer, meetings=meetings, commits=commits, events=events, settled=settled
        )

    yield make
    thread.close()


def window(number=0, tokens=40):
    return Contribution(
        window=number, delta=torch.ones(50), tokens=tokens, steps=4, loss=2.0, lr=1e-3
    )


def settling(made, *, included=True, members=2, position=None):
    """Let the next window be settled at once."""

    def settle(offered):
        at = made.meetings.state.position + 1 if position is None else position
        made.meetings.state = made.meetings.state.at(at)
        made.settled.put(
            GossipSettled(
                state=made.meetings.state,
                number=offered.number,
                included=included,
                members=members,
                loss=2.0,
                tokens=40,
                trace=RoundTrace(position=at - 1),
            )
        )

    made.meetings.on_offer = settle


def test_a_window_that_met_somebody_is_included(seam):
    made = seam()
    settling(made)
    made.reducer.submit(window())
    made.reducer.wait()
    (commit,) = made.commits
    assert (commit.position, commit.members, commit.settles) == (1, 2, True)
    assert commit.included.all()
    assert made.meetings.offered[0].weight == 10.0


def test_a_window_whose_meeting_broke_stays_with_its_peer(seam):
    made = seam()
    settling(made, included=False)
    made.reducer.submit(window())
    made.reducer.wait()
    assert made.commits[0].included is None
    assert made.commits[0].settles


def test_a_window_in_doubt_does_not_stop_training(seam):
    made = seam(patience_s=0.05)
    made.reducer.submit(window())
    made.reducer.wait()
    assert made.commits == []
    settling(made)
    made.meetings.on_offer(made.meetings.offered[0])
    made.reducer.wait()
    assert made.commits[0].included.all()


def test_a_joiners_first_window_has_no_weight(seam):
    made = seam(7, is_borrowed=True)
    settling(made)
    for number in range(2):
        made.reducer.submit(window(number))
        made.reducer.wait()
    assert [offered.weight for offered in made.meetings.offered] == [0.0, 10.0]


def test_the_end_of_the_run_ends_the_waiting(seam):
    made = seam(5, rounds=5)
    made.reducer.submit(window())
    made.reducer.wait()
    assert made.commits == []


def test_another_model_is_refused(seam):
    made = seam()
    with pytest.raises(LayoutError, match="expected the run's model"):
        made.reducer.start(Layout(names=("v",), shapes=((3,),)), torch.zeros(3), print)


def test_a_restart_takes_up_the_saved_state_where_nobody_has_a_later_one(seam):
    made = seam()
    saved = made.reducer.state_dict() | {"position": 9, "params_N": torch.full((50,), 3.0)}
    again = seam()
    again.reducer.load_state_dict(saved)
    assert again.meetings.installed == [9]
    assert again.reducer.position == 9
    assert torch.equal(again.commits[0].params_N, torch.full((50,), 3.0))
    assert not again.commits[0].reset


def test_a_restart_goes_on_from_a_neighbours_later_state(seam):
    saved = seam().reducer.state_dict() | {"position": 4}
    made = seam(7, is_borrowed=True)
    made.reducer.load_state_dict(saved)
    assert made.meetings.installed == []
    assert made.commits[0].reset
    assert made.reducer.position == 7


def test_a_saved_state_of_nan_is_refused(seam):
    saved = seam().reducer.state_dict() | {"params_N": torch.full((50,), torch.nan), "position": 4}
    with pytest.raises(ValueError, match="finite"):
        seam().reducer.load_state_dict(saved)


def test_a_peer_alone_offers_nothing_until_another_is_reached(seam):
    waiting = []
    company = types.SimpleNamespace(
        is_alone=True, with_others=lambda fragment, offer: waiting.append(offer)
    )
    made = seam(company=company, patience_s=0.01)
    settling(made)
    made.reducer.submit(window())
    ended = threading.Thread(target=made.reducer.wait)
    ended.start()
    ended.join(0.05)
    assert ended.is_alive()  # although its patience is over
    made.reducer._thread.ask(lambda: None)  # until the loop has taken the window
    assert (made.meetings.offered, len(waiting)) == ([], 1)
    # It stays alone, so that its short patience does not end before the window is settled.
    made.reducer._thread.ask(waiting[0])
    ended.join(10)
    assert not ended.is_alive()
    assert len(made.commits) == 1
