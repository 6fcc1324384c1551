"""Memory is bounded by peers and units, however long a run lasts."""

from pathlib import Path

import pytest

from atoll.peer.lab.hunt import plans, world
from atoll.peer.lab.hunt.checks import MEMORY_RULE
from atoll.peer.lab.hunt.edges import HuntLoop
from atoll.peer.lab.hunt.hunting import run_plan
from atoll.peer.lab.hunt.world import COUNTS_S, LOOK_S, World


def test_a_set_that_is_never_pruned_is_found() -> None:
    broken = run_plan(plans.draw(1, minutes=0.5), "unpruned-set").broken
    assert broken is not None and broken.rule == MEMORY_RULE
    assert "items in Tasks._tasks" in str(broken)


def test_what_a_healed_link_brings_at_once_is_counted_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In seed 52369, seventy calls of the last half minute, none of which was waited for."""
    counted: list[float] = []
    monkeypatch.setattr(world, "check_memory", lambda world: counted.append(world.now()))
    loop = HuntLoop()
    place = World(plans.draw(1, minutes=0.5), tmp_path, loop)
    place.later(COUNTS_S, lambda: None)
    for at_s in (COUNTS_S, COUNTS_S + LOOK_S, COUNTS_S + LOOK_S):
        place.now = lambda at_s=at_s: at_s
        place._do_due()
        place._look()
    loop.close()
    assert counted == [COUNTS_S + LOOK_S]
