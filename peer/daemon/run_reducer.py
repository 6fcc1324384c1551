"""What a networked peer's reducer is, whatever the kind of its run."""

from __future__ import annotations

import threading
from typing import Protocol

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.methods import Method
from atoll.optim.reducer import Reducer
from atoll.optim.workers.timetable import Timetable
from atoll.peer.daemon.reporting import TrainerView


class RunReducer(Reducer, Protocol):
    """A `Reducer` that knows its run and can be left."""

    spec: RunSpec
    peer_id: str
    stopping: threading.Event
    """set where the peer is told to stop: nothing is waited for any more"""
    encode_s: float
    """what encoding the last contribution took"""

    @property
    def method(self) -> Method:
        """The run's method, whose `worker` goes into a training loop."""
        ...

    @property
    def timetable(self) -> Timetable:
        """Steps and windows of the run by position of its log."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the run has all its rounds: what is trained from here on reaches nobody."""
        ...

    @property
    def hands_in(self) -> bool:
        """Whether a window has ended whose contribution is still on its way to the rounds."""
        ...

    def progress(self) -> TrainerView | None:
        """What can be told of a trainer that does not tell itself; None before it has started."""
        ...

    def close(self) -> None:
        """Leave the run: roster, connections, threads."""
        ...
