"""What a networked peer's reducer is, whatever the kind of its run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.methods import Method
from atoll.optim.reducer import Reducer
from atoll.optim.state.layout import Layout, LayoutError
from atoll.optim.workers.timetable import Timetable
from atoll.peer.daemon.progress import TrainerProgress

if TYPE_CHECKING:
    from atoll.peer.daemon.peer import Peer

STOP_POLL_S = 0.2  # how soon a waiting trainer notices that it should stop


class RunReducer(Reducer, Protocol):
    """A `Reducer` that knows its run and can be left."""

    spec: RunSpec
    peer_id: str
    stopping: threading.Event
    """set when the peer should stop: the trainer then waits for nothing more"""
    progress: TrainerProgress

    @property
    def peer(self) -> Peer:
        """The peer in the loop's thread; read single attributes only."""
        ...

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
        """Return whether the run is complete: what is trained from here on reaches nobody."""
        ...

    def close(self) -> None:
        """Leave the run: roster, connections, threads. Idempotent."""
        ...


def expect_layout(expected: Layout, got: Layout) -> None:
    """Check that a trainer has the run's model.

    Raises:
        LayoutError: it has another one.
    """
    if got != expected:
        raise LayoutError(
            f"expected the run's model of {expected.numel} parameters, got one of "
            f"{got.numel}; build it from the run's spec"
        )
