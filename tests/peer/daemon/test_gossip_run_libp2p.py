"""Runs by gossip over libp2p: peers meet, one joins, one starts again, one is alone."""

import threading

import pytest
import torch

from atoll.peer.daemon.process import wait_until_stored
from atoll.peer.training.opening import build_model
from atoll.peer.training.trainer import Trainer, TrainerOptions

ROUNDS = 12


def trainer_of(reducer, path):
    peer = reducer.peer
    options = TrainerOptions(
        peer_id=peer.peer_id,
        device="cpu",
        position=peer.position,
        validate_every=0,
        share=0.3,  # of the time: three trainers share two cores with other tests
        state_path=path,
    )
    model = build_model(peer.spec, 256)
    return Trainer(peer.spec, reducer, options, model=model)


class Training:
    """A trainer in a thread, as the daemon has it in its main thread."""

    def __init__(self, joined, path=None):
        self.reducer = joined.reducer
        self.trainer = trainer_of(joined.reducer, path)
        self.reducer.progress.watch(self.reducer.progress.measured)
        self.thread = threading.Thread(target=self.trainer.run, daemon=True)
        self.thread.start()

    def stop(self):
        self.trainer.stop()
        self.reducer.stopping.set()
        self.thread.join(30)


def gossip(joined):
    return joined.peer.run.gossip.statistics()


def test_peers_meet_and_a_joiner_takes_a_neighbours_state(kit, organise, join, tmp_path):
    spec = kit.tiny_spec(
        run={"rounds": 0},
        outer={"method": "noloco", "inner_steps": 2},
        round={"min_peers": 2},
    )
    organiser = organise(spec)
    joined = [join(organiser.invite, name) for name in ("ann", "bob")]
    training = [Training(each, tmp_path / f"{i}.safetensors") for i, each in enumerate(joined)]
    try:
        kit.until(lambda: all(each.peer.position >= 3 for each in joined), "three rounds")
        kit.until(lambda: gossip(joined[0]).partner == joined[1].peer.peer_id, "a meeting")
        assert [gossip(each).mass for each in joined] == [1.0, 1.0]

        eve = join(organiser.invite, "eve")
        assert eve.said("recovered the state of round")
        assert eve.peer.position >= 3
        assert gossip(eve).mass == 0.0
        training.append(Training(eve))
        kit.until(lambda: gossip(eve).mass > 0.0, "the joiner to have met somebody")
        status = kit.until(
            lambda: (s := organiser.status()).position >= 5 and s.history and s, "progress"
        )
        assert status.state == "training"
        assert {peer.partner for peer in status.peers} <= {"", *(p.peer_id for p in status.peers)}
        assert status.history[0].loss is not None

        training[1].stop()
        joined[1].reducer.close()
        others = [each.peer.position for each in (joined[0], eve)]
        again = join(organiser.invite, "bob")
        assert again.peer.position >= min(others)  # bob may have been ahead of both
        training[1] = Training(again)
        kit.until(lambda: gossip(again).partner, "the one that came back to have met somebody")
    finally:
        for each in training:
            each.stop()
    states = [each.trainer.worker.synced_N for each in training]
    assert all(bool(torch.isfinite(state).all()) for state in states)


@pytest.mark.exhaustive
def test_a_lone_peer_goes_on_alone_and_the_coordinator_keeps_its_model(kit, organise, join):
    spec = kit.tiny_spec(
        run={"rounds": ROUNDS},
        outer={"method": "noloco", "inner_steps": 1},
        coordinator={"checkpoint_every": 4},
    )
    organiser = organise(spec)
    ann = join(organiser.invite, "ann")
    training = Training(ann)
    training.thread.join(60)
    assert training.trainer.finished
    assert wait_until_stored(ann.peer.run, 60.0, threading.Event(), print)
    status = kit.until(lambda: (s := organiser.status()).state == "finished" and s, "the end")
    assert status.position == ROUNDS
    kept = organiser.up.coordinator.log.replica.state
    assert torch.equal(kept.params_N, training.trainer.worker.synced_N)
