"""Memory is bounded by peers and units, however long a run lasts."""

from atoll.peer.lab.hunt import plans
from atoll.peer.lab.hunt.checks import MEMORY_RULE
from atoll.peer.lab.hunt.hunting import run_plan


def test_a_set_that_is_never_pruned_is_found() -> None:
    broken = run_plan(plans.draw(1, minutes=0.5), "unpruned-set").broken
    assert broken is not None and broken.rule == MEMORY_RULE
    assert "items in Tasks._tasks" in str(broken)
