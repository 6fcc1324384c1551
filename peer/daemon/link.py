"""A peer's place in a run: a thread with an event loop in it, and in that a ``Session``.

The trainer's thread sees none of it but the reducer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from atoll.coordinator.rpc.client import Joined
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.phases import OnPhase
from atoll.coordinator.run.spec import RunSpec
from atoll.peer.daemon.logged import LogParticipation
from atoll.peer.daemon.membership import StateDirectory
from atoll.peer.daemon.reporting import TrainerView
from atoll.peer.daemon.run_reducer import RunReducer
from atoll.peer.daemon.session import LinkOptions, Participation, Session
from atoll.peer.gossip.participation import GossipParticipation
from atoll.peer.paths import PeerPaths

CLOSE_S = 20.0
POLL_S = 0.1


class Link:
    """A running peer's connections.  ``open`` starts the thread, ``close`` ends it."""

    def __init__(
        self, options: LinkOptions, *, on_event: Callable[[Level, str], None], on_phase: OnPhase
    ) -> None:
        """Use ``open``."""
        self._directory = StateDirectory(PeerPaths(root=options.state_dir), options.invite.run_id)
        try:
            self._session = Session(
                options,
                self._directory,
                say=on_event,
                on_phase=on_phase,
                on_close=self.close,
                take_part=participation,
            )
        except BaseException:
            self._directory.close()
            raise
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run_loop, name="atoll-link", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        options: LinkOptions,
        *,
        on_event: Callable[[Level, str], None],
        on_phase: OnPhase = lambda phase, position, left=None: None,
        stopping: threading.Event | None = None,
    ) -> Link:
        """Join and recover; returns once the replica holds a verified state.

        Args:
            options: the peer's own.
            on_event: told what a person may want to read, in the link's thread.
            on_phase: told what part of a round this peer is in, at which position; likewise.
            stopping: ends the waiting, from another thread or a signal handler.

        Raises:
            LinkError: the state directory is not usable.
            CoordinatorError: the coordinator refuses this peer.
            KeyboardInterrupt: ``stopping`` was set.
        """
        link = cls(options, on_event=on_event, on_phase=on_phase)
        starting = asyncio.run_coroutine_threadsafe(link._session.start(), link._loop)
        try:
            while not starting.done():
                if stopping is not None and stopping.is_set():
                    raise KeyboardInterrupt
                time.sleep(POLL_S)
            starting.result()
        except BaseException:
            starting.cancel()
            link.close()
            raise
        return link

    @property
    def reducer(self) -> RunReducer:
        """For ``atoll.optim.DiLoCo``."""
        return self._session.taking_part.reducer

    @property
    def peer_id(self) -> str:
        """This peer."""
        return self._session.identity.peer_id

    @property
    def spec(self) -> RunSpec:
        """Of the run."""
        return self._session.spec

    @property
    def position(self) -> int:
        """Entries applied; by gossip, the round."""
        return self._session.taking_part.position

    def paces_s(self) -> list[float]:
        """Seconds that a step takes each of the other trainers, as far as they say."""
        return self._session.paces_s()

    def watch(self, view: Callable[[], TrainerView]) -> None:
        """Tell the others what ``view`` says about the trainer; called in the link's thread."""
        self._session.view = view

    def wait_until_stored(self, timeout_s: float, stopping: threading.Event | None = None) -> bool:
        """Wait until the coordinator has all that this peer has to give it; whether it has.

        Args:
            timeout_s: the longest wait; a coordinator that is away may not come back.
            stopping: ends the waiting, from another thread or a signal handler.
        """
        stopping = stopping or threading.Event()
        deadline = time.monotonic() + timeout_s
        while not self._session.taking_part.stored_all():
            if time.monotonic() > deadline or stopping.wait(POLL_S):
                return False
        return True

    def close(self) -> None:
        """Leave the roster, say goodbye, end the thread."""
        if not self._thread.is_alive():
            return
        stopping = asyncio.run_coroutine_threadsafe(self._session.stop(), self._loop)
        try:
            with suppress(TimeoutError):
                stopping.result(timeout=CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(timeout=CLOSE_S)
            self._directory.close()

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._ended.wait())


def participation(session: Session, joined: Joined | None) -> Participation:
    """What a run's method asks of a peer."""
    if session.spec.method().reduction == "pairs":
        return GossipParticipation(session, joined)
    return LogParticipation(session, joined)
