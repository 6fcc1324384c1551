"""A follower as a process: joins, keeps the run until a signal or its end, and leaves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from atoll.coordinator.run.notice import Report
from atoll.peer.daemon.followed import Followed, FollowOptions
from atoll.peer.daemon.loop_thread import LoopThread
from atoll.peer.daemon.process import INTERRUPTED, OK, log_file, stop_on_signals
from atoll.peer.daemon.state_directory import expect_run
from atoll.peer.paths import PeerPaths

POLL_S = 0.2  # how late a line about a round is


@dataclass(frozen=True, kw_only=True)
class FollowerPlace:
    """The progress of a follower."""

    peer_id: str
    """Of its first peer, if it follows several stages."""
    run_name: str
    modules: tuple[str, ...]
    """What it follows; one without a name in a dense run."""
    positions: tuple[int, ...]
    """By module."""
    rounds: int
    """The rounds of the run; 0 if it has no end."""
    first_body: int
    """The position from which it has every update: 0 once it has the whole log."""
    is_complete: bool

    @property
    def position(self) -> int:
        """Return the rounds that it has of all modules."""
        return min(self.positions)


def run_follower(
    options: FollowOptions, *, on_event: Report, on_moved: Callable[[FollowerPlace], None]
) -> int:
    """Follow until the run is complete or a signal stops it; return the exit code.

    Args:
        options: of its owner.
        on_event: takes what a person may want to read, in several threads.
        on_moved: takes where it stands at the start, and after each round.

    Raises:
        CannotFollow: the run has no log, or no such stage.
        ExportError: its exports are not allowed.
        StateDirectoryError, CoordinatorError, PortInUse: it cannot start with these options.
    """
    paths, stopping = PeerPaths(root=options.peer.state_dir), threading.Event()
    expect_run(paths, options.peer.invite.run_id)  # before a log file is written there
    with stop_on_signals(stopping.set) as received, log_file(paths):
        try:
            follower = Follower(options, on_event, stopping)
        except KeyboardInterrupt:
            return INTERRUPTED if signal.SIGINT in received else OK
        with closing(follower):
            for place in follower.places():
                on_moved(place)
    return INTERRUPTED if signal.SIGINT in received else OK


class Follower:
    """A follower in its thread."""

    def __init__(self, options: FollowOptions, on_event: Report, stopping: threading.Event) -> None:
        """Join, and return once there are verified states; see `run_follower`.

        Raises:
            KeyboardInterrupt: `stopping` was set meanwhile.
        """
        self._stopping = stopping
        self._thread = LoopThread(Followed.open(options, on_event), stopping)

    @property
    def followed(self) -> Followed:
        """Return what it follows; it belongs to the loop."""
        return self._thread.value

    @property
    def place(self) -> FollowerPlace:
        """Return where it stands."""
        followed = self.followed
        return FollowerPlace(
            peer_id=followed.peers[0].peer_id,
            run_name=followed.spec.run.name,
            modules=tuple(peer.module for peer in followed.peers),
            positions=followed.positions,
            rounds=followed.rounds,
            first_body=followed.first_body,
            is_complete=followed.is_complete,
        )

    def places(self) -> Iterator[FollowerPlace]:
        """Yield where it stands, first and whenever it has moved, until the end or a stop.

        Raises:
            PeerEvicted, StoreError: it takes part no longer.
        """
        last: FollowerPlace | None = None
        while not self._stopping.is_set():
            self.followed.expect_working()
            if (place := self.place) != last:
                last = place
                yield place
            if place.is_complete and self._thread.ask(self.followed.has_written):
                return
            self._stopping.wait(POLL_S)

    def close(self) -> None:
        """Leave the run, with everything on the disk. Idempotent."""
        self._thread.close()
