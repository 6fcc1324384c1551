"""What a peer says while nothing can be decided."""

import threading

import torch

from atoll.optim.reducer import Contribution
from atoll.optim.reduction.feedback import Feedback
from atoll.peer.daemon.contact import Contact
from atoll.peer.daemon.process import DaemonOptions, PeerDaemon
from atoll.peer.daemon.reporting import TrainerView
from atoll.peer.daemon.session import LinkOptions


class Running:
    """A daemon in a thread, and what it said."""

    def __init__(self, invite, folder):
        link = LinkOptions(
            invite=invite, state_dir=folder, name=folder.name, listen=("/ip4/127.0.0.1/tcp/0",)
        )
        self.said = []
        self._daemon = PeerDaemon(
            DaemonOptions(link=link, device="cpu"), on_event=lambda e: self.said.append(e.text)
        )
        self._thread = threading.Thread(target=self._daemon.run, daemon=True)
        self._thread.start()

    def stop(self):
        self._daemon.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_peers_that_were_all_started_again_say_what_they_wait_for(
    organise, kit, tmp_path, monkeypatch
):
    """They had been killed: nothing tells the coordinator that their votes are not needed."""
    monkeypatch.setattr(Contact, "has_retired", lambda contact: False)
    organiser = organise(kit.tiny_spec(run={"rounds": 0}, round={"min_peers": 2}))
    names = ("ann", "ben")
    crew = [Running(organiser.invite, tmp_path / name) for name in names]
    kit.until(lambda: organiser.status().position >= 1, "a round")
    for peer in crew:
        peer.stop()
    again = [Running(organiser.invite, tmp_path / name) for name in names]
    try:
        for peer in again:
            kit.until(
                lambda said=peer.said: any("has no quorum: 0 of its" in text for text in said),
                "it to say what is missing",
            )
            assert any("the coordinator opens after 60 s" in text for text in peer.said)
    finally:
        for peer in again:
            peer.stop()


def test_a_trainer_whose_contribution_is_being_encoded_is_ready(organise, kit, join, monkeypatch):
    """It may be in its next window already, and tell its steps left of that."""
    spec = kit.tiny_spec(round={"min_peers": 2})
    link = join(organise(spec).invite).link
    go_on, encode = threading.Event(), Feedback.offer

    def slow(*arguments):
        assert go_on.wait(60)
        return encode(*arguments)

    monkeypatch.setattr(Feedback, "offer", slow)
    layout, reducer = kit.first_state(spec).layout, link.reducer
    reducer.start(layout, torch.zeros(layout.numel), lambda commit: None)
    link.watch(lambda: TrainerView(ready_in_s=40.0))
    assert link._session.ready_in_s() == 40.0
    delta_N = torch.ones(layout.numel)
    reducer.submit(Contribution(window=0, delta=delta_N, tokens=64, steps=2, loss=2.0))
    assert link._session.ready_in_s() == 0.0
    go_on.set()
    kit.until(lambda: not reducer.hands_in, "the contribution on offer")
    assert link._session.ready_in_s() == 40.0
