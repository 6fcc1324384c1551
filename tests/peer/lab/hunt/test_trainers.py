"""When the process of a simulated trainer ends."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from atoll.peer import notices
from atoll.peer.daemon.process import STORED_S
from atoll.peer.lab.hunt.edges import MACHINE, Edges, HuntLoop, replaced
from atoll.peer.lab.hunt.trainers import Training

NEVER_S = 1e9


class RunThatIsOver:
    """A peer whose run is over, or that its owner has ended before that."""

    def __init__(self, *, stored_at_s, finished=True, stopped_at_s=NEVER_S):
        self._stored_at_s = stored_at_s
        self._finished = finished
        self._stopped_at_s = stopped_at_s
        self.spec = SimpleNamespace(data=SimpleNamespace(num_units=0))
        self.run = self
        self.told = []

    def reducer(self, thread):
        self._stopping = thread.stopping
        return SimpleNamespace(finished=self._finished, stopping=thread.stopping)

    def stored_all(self):
        if time.monotonic() >= self._stopped_at_s:
            self._stopping.set()
        return time.monotonic() >= self._stored_at_s

    def storing(self):
        return False

    def heard(self, machine, level, text):
        self.told.append((level, str(text)))


class TrainingWithoutSteps(Training):
    def _loop(self, reducer):
        pass


def lasts_s(peer):
    """Return how long the trainer of a peer lives."""

    async def live():
        MACHINE.set(SimpleNamespace(world=peer))
        await TrainingWithoutSteps(peer, 1.0, 0).run()
        return loop.time()

    loop = HuntLoop()
    with replaced(Edges(loop, 0), []), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(live())


def test_a_trainer_waits_at_the_end_until_the_coordinator_has_it_all():
    """In seed 61432 it ended at once, again and again, before it had sent what was missing."""
    assert lasts_s(RunThatIsOver(stored_at_s=20.0)) == pytest.approx(20.0, abs=0.2)


def test_a_coordinator_that_never_has_all_of_it_holds_nobody_for_ever():
    peer = RunThatIsOver(stored_at_s=NEVER_S)
    assert lasts_s(peer) == pytest.approx(STORED_S, abs=0.2)
    assert peer.told[-1] == ("warning", notices.coordinator_not_stored())


def test_an_owner_ends_the_wait():
    peer = RunThatIsOver(stored_at_s=NEVER_S, stopped_at_s=5.0)
    assert lasts_s(peer) == pytest.approx(5.0, abs=0.2)


def test_a_trainer_that_ends_before_its_run_waits_for_nobody():
    assert lasts_s(RunThatIsOver(stored_at_s=NEVER_S, finished=False)) == 0.0
