"""Faults that are aimed at a moment: one waits for the next commit of an exchange by gossip."""

from pathlib import Path

import pytest

from atoll.peer.lab.hunt import plans
from atoll.peer.lab.hunt.edges import HuntLoop
from atoll.peer.lab.hunt.machines import Machine
from atoll.peer.lab.hunt.plans import PlannedFault
from atoll.peer.lab.hunt.world import World


@pytest.mark.parametrize("amount", [0.1, 0.5, 0.7, 0.9])
def test_the_next_commit_alone_is_struck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amount: float
) -> None:
    """Its partner is lost, for a moment or a while, or the process is killed, or loses power."""
    loop = HuntLoop()
    world = World(plans.draw(15, minutes=0.5), tmp_path, loop)
    loop.close()
    one, other = world.peers[:2]
    struck: list[str] = []
    world.mesh.reset = lambda a, b: struck.append("reset")
    world.faults._cut_off = lambda pairs, lasts_s: struck.append(f"cut for {lasts_s:g} s")
    one.crash = lambda *, lost_power: struck.append("power" if lost_power else "killed")
    fault = PlannedFault(at_s=1.0, kind="commit", who=0, other=0, lasts_s=5.0, amount=amount)
    world.faults.committed(one, other.identity.peer_id)
    assert struck == []  # no fault has been planned yet
    world.faults.happen(fault)
    for _ in range(2):
        world.faults.committed(one, other.identity.peer_id)
    wanted = {0.1: ["reset", "cut for 5 s"], 0.5: ["reset"], 0.7: ["killed"], 0.9: ["power"]}
    assert struck == wanted[amount]
    world.faults.happen(fault)
    monkeypatch.setattr(Machine, "start", lambda self: None)
    world._heal()
    world.faults.committed(one, other.identity.peer_id)
    assert struck == wanted[amount]
