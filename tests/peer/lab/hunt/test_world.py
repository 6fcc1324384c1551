"""What a simulated run waits for once everything has healed."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.optim.log.orders import RunSettings
from atoll.peer.lab.hunt import plans, world
from atoll.peer.lab.hunt.edges import HuntLoop
from atoll.peer.lab.hunt.world import COUNTS_S, LOOK_S, World


@pytest.fixture
def place(tmp_path: Path) -> World:
    """A world in which nothing has started."""
    loop = HuntLoop()
    place = World(plans.draw(0, minutes=0.5), tmp_path, loop)
    loop.close()
    return place


def test_what_a_healed_link_brings_at_once_is_counted_a_moment_later(
    place: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In seed 52369, seventy calls of the last half minute, none of which was waited for."""
    counted: list[float] = []
    monkeypatch.setattr(world, "check_memory", lambda world: counted.append(world.now()))
    place.later(COUNTS_S, lambda: None)
    for at_s in (COUNTS_S, COUNTS_S + LOOK_S, COUNTS_S + LOOK_S):
        place.now = lambda at_s=at_s: at_s
        place._do_due()
        place._look()
    assert counted == [COUNTS_S + LOOK_S]


@pytest.mark.parametrize("waiting", [[], [b"order 2", b"order 4"]])
def test_orders_that_wait_are_not_decided_whatever_key_signed_them(
    place: World, waiting: list[bytes]
) -> None:
    """In seed 52267 the key of order 4 was that of order 2, which waited as well."""
    store = SimpleNamespace(headers=lambda start, count: [])
    log = SimpleNamespace(
        orders=lambda: waiting,
        replica=SimpleNamespace(store=store, settings=RunSettings(), position=0),
    )
    place.coordinator.running = SimpleNamespace(coordinator=SimpleNamespace(log=log))
    place.organiser.given.append((4, b"order 4"))
    place.organiser._key_of[b"order 4"] = b"the key that order 2 names"
    assert place._has_all_orders() == (not waiting)
