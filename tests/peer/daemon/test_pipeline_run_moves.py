"""A move for a better balance, in a live run: four peers at the first stage, one at the second."""

import pytest

from atoll.coordinator.coordinator import Coordinator
from atoll.peer.daemon.options import LinkRates
from atoll.peer.pipeline import placement
from support.organiser import stand_on_one_log, until

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(600)]

RATES = LinkRates(uplink_mbit_s=100.0, downlink_mbit_s=100.0)
PLACES = ("stage-1", "stage-2", "stage-1", "stage-1", "stage-1")
# Stages that take equally long whatever the machine does: the first one computes twice.
MODEL = """
import time
from functools import partial

from torch import nn

from atoll.peer.training.models import model


class Slow(nn.Module):
    def __init__(self, inside, seconds):
        super().__init__()
        self.inside, self.seconds = inside, seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return self.inside(x)


@model(slices=True)
def build(*, vocab_size, seq_len, width=16, **_):
    first = lambda: Slow(nn.Embedding(vocab_size, width), 0.02)
    last = lambda: Slow(nn.Linear(width, vocab_size), 0.04)
    return [first, *[partial(nn.Linear, width, width)] * 16, last]
"""


def test_a_peer_moves_from_a_stage_in_excess_to_the_slowest(
    own_modules, tmp_path, organise, kit, start, monkeypatch
):
    (tmp_path / "equal.py").write_text(MODEL)
    places, honest = iter(PLACES), Coordinator.place
    given = {}

    def place(self, peer_id, module, **named):
        if not module and peer_id not in given:
            given[peer_id] = next(places)
        return honest(self, peer_id, module or given[peer_id], **named)

    monkeypatch.setattr(Coordinator, "place", place)
    monkeypatch.setattr(placement, "CONFIRM_S", 2.0)  # else the second look comes 30 s later
    organiser = organise(
        kit.tiny_spec(
            run={"rounds": 0},
            model={"custom": "equal:build", "overrides": {}},
            inner={"batch_size": 2, "grad_accumulation": 4, "warmup_steps": 2},
            round={"min_peers": len(PLACES), "snapshot_every": 1, "grace_s": 5.0, "stall_s": 3.0},
            topology={"stages": 2, "rebalance_s": 2.0},
        )
    )
    running = []
    for number in range(len(PLACES)):
        options = {"share": 1.0, "allow_models": frozenset({"equal:build"})}
        peer = start(organiser.invite, f"peer-{number}", rates=RATES, **options)
        running.append(peer)
        until(lambda: len(organiser.status().peers) == len(running), "the peer")

    def movers():
        return [peer for peer in running if peer.said("moves from stage-1 to stage-2")]

    until(movers, "a move")
    mover = f"peer-{running.index(movers()[0])}"

    def serves():
        peer = next(peer for peer in organiser.status().peers if peer.name == mover)
        return peer.module == "stage-2" and peer.flow is not None and peer.flow.counted > 0

    until(serves, "work of the mover in its new stage")
    stood = {each.name: each.position for each in organiser.status().modules}
    until(
        lambda: all(each.position >= stood[each.name] + 2 for each in organiser.status().modules),
        "two more rounds of each stage",
    )
    assert len(movers()) == 1
    until(lambda: stand_on_one_log(organiser), "the coordinator to have every entry")
    modules = sorted(peer.module for peer in organiser.status().peers)
    assert modules == ["stage-1"] * 3 + ["stage-2"] * 2
