"""What a peer says while nothing can be decided."""

import threading
import time

import torch

from atoll.optim.reducer import Contribution
from atoll.optim.reduction.contribution import Feedback
from atoll.peer.daemon.log_run import Publisher
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.process import RunOptions, Stop, join_and_train
from atoll.peer.daemon.views import TrainerView


class Running:
    """A peer in a thread, and what it said."""

    def __init__(self, invite, folder):
        peer = PeerOptions(
            invite=invite, state_dir=folder, name=folder.name, listen=("/ip4/127.0.0.1/tcp/0",)
        )
        self.said, self._stop = [], Stop()
        self._thread = threading.Thread(
            target=join_and_train,
            args=(RunOptions(peer=peer, device="cpu", yes=True, share=0.3),),
            kwargs={"on_event": lambda e: self.said.append(e.text), "stop": self._stop},
            daemon=True,
        )
        self._thread.start()

    def stop(self):
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_peers_that_were_all_started_again_wait_for_no_stall(
    organise, kit, tmp_path, monkeypatch, network_threads
):
    """They had been killed: nothing tells the coordinator that their votes are not needed."""
    monkeypatch.setattr(Publisher, "has_retired", lambda publisher: False)
    organiser = organise(kit.tiny_spec(run={"rounds": 0}, round={"min_peers": 2}))
    names = ("ann", "ben")
    crew = [Running(organiser.invite, tmp_path / name) for name in names]
    kit.until(lambda: organiser.status().position >= 1, "a round")
    for peer in crew:
        peer.stop()
    stood_at = organiser.status().position
    again = [Running(organiser.invite, tmp_path / name) for name in names]
    try:
        kit.until(lambda: organiser.status().position > stood_at, "another round")
        told = [event.text for event in organiser.status().events]
        assert any("acceptors restarted, or fell silent" in text for text in told)
    finally:
        for peer in again:
            peer.stop()


def test_a_trainer_whose_contribution_is_being_encoded_is_ready(organise, kit, join, monkeypatch):
    """It may be in its next window already, and tell its steps left of that."""
    spec = kit.tiny_spec(round={"min_peers": 2})
    reducer = join(organise(spec).invite).reducer
    go_on, encode = threading.Event(), Feedback.offer

    def slow(*arguments):
        assert go_on.wait(60)
        return encode(*arguments)

    monkeypatch.setattr(Feedback, "offer", slow)
    layout, progress = kit.first_state(spec).layout, reducer.progress
    reducer.start(layout, torch.zeros(layout.numel), lambda commit: None)
    progress.watch(lambda: TrainerView(ready_at_s=time.monotonic() + 1e6))
    assert progress.ready_in_s() > 9e5
    delta_N = torch.ones(layout.numel)
    reducer.submit(Contribution(window=0, delta=delta_N, tokens=64, steps=2, loss=2.0))
    assert progress.ready_in_s() == 0.0
    go_on.set()
    kit.until(lambda: not progress.hands_in, "the contribution on offer")
    assert progress.ready_in_s() > 9e5
