"""A follower as a process: joins, keeps the run until a signal or its end, and leaves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from atoll.coordinator.rpc.client import Joined
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice, Report
from atoll.coordinator.run.spec import RunSpec
from atoll.peer.daemon.follow_run import FollowRun, expect_followable
from atoll.peer.daemon.loop_thread import LoopThread
from atoll.peer.daemon.membership import FetchTokenizer, Membership
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.peer import Environment, Peer, StartRun
from atoll.peer.daemon.process import INTERRUPTED, OK, log_file, stop_on_signals
from atoll.peer.daemon.state_directory import expect_run
from atoll.peer.paths import PeerPaths

POLL_S = 0.2  # how late a line about a round is


@dataclass(frozen=True, kw_only=True)
class FollowerPlace:
    """The progress of a follower."""

    peer_id: str
    run_name: str
    position: int
    rounds: int
    """The rounds of the run; 0 if it has no end."""
    first_body: int
    """The position from which it has every update: 0 once it has the whole log."""
    is_complete: bool


def run_follower(
    options: PeerOptions,
    *,
    checkpoint_every: int | None,
    on_event: Report,
    on_moved: Callable[[FollowerPlace], None],
) -> int:
    """Follow until the run is complete or a signal stops it; return the exit code.

    Args:
        options: of its owner.
        checkpoint_every: rounds between two checkpoints; None: the run's own.
        on_event: takes what a person may want to read, in several threads.
        on_moved: takes where it stands at the start, and after each round.

    Raises:
        CannotFollow: the run has no single log.
        StateDirectoryError, CoordinatorError, PortInUse: it cannot start with these options.
    """
    paths, stopping = PeerPaths(root=options.state_dir), threading.Event()
    expect_run(paths, options.invite.run_id)  # before a log file is written there
    with stop_on_signals(stopping.set) as received, log_file(paths):
        try:
            follower = Follower(options, checkpoint_every, on_event, stopping)
        except KeyboardInterrupt:
            return INTERRUPTED if signal.SIGINT in received else OK
        with closing(follower):
            for place in follower.places():
                on_moved(place)
    return INTERRUPTED if signal.SIGINT in received else OK


class Follower:
    """A follower in its thread."""

    def __init__(
        self,
        options: PeerOptions,
        checkpoint_every: int | None,
        on_event: Report,
        stopping: threading.Event,
    ) -> None:
        """Join, and return once there is a verified state; see `run_follower`.

        Raises:
            KeyboardInterrupt: `stopping` was set meanwhile.
        """
        self._run: FollowRun | None = None
        self._on_event = on_event
        self._stopping = stopping

        async def start(env: Environment, joined: Joined | None) -> FollowRun:
            run = await FollowRun.start_keeping(env, joined, checkpoint_every)
            self._run = run
            return run

        def kind(spec: RunSpec) -> StartRun:
            return start

        opening = Peer.open(
            options,
            kind,
            admit=_admit,
            on_event=self._note,
            on_phase=lambda phase, position, left=None: None,
        )
        self._thread = LoopThread(opening, stopping)

    def _note(self, level: Level, notice: Notice) -> None:
        if self._run is not None:
            self._run.keep_event(level, notice)
        self._on_event(level, notice)

    @property
    def place(self) -> FollowerPlace:
        """Return where it stands."""
        peer, run = self._thread.value, self._run
        assert run is not None
        return FollowerPlace(
            peer_id=peer.peer_id,
            run_name=peer.spec.run.name,
            position=run.position,
            rounds=run.progress.ahead().rounds(peer.spec.run.rounds),
            first_body=run.replica.store.first_with_bodies(),
            is_complete=run.is_complete,
        )

    def places(self) -> Iterator[FollowerPlace]:
        """Yield where it stands, first and whenever it has moved, until the end or a stop.

        Raises:
            PeerEvicted, StoreError: it takes part no longer.
        """
        last: FollowerPlace | None = None
        while not self._stopping.is_set():
            self._thread.value.run.expect_working()
            if (place := self.place) != last:
                last = place
                yield place
            if place.is_complete:
                return
            self._stopping.wait(POLL_S)

    def close(self) -> None:
        """Leave the run, with everything on the disk. Idempotent."""
        self._thread.close()


async def _admit(membership: Membership, fetch: FetchTokenizer) -> None:
    expect_followable(membership.spec)
