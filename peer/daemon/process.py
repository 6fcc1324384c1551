"""The peer daemon: a link, a trainer, and the few things that tie them together.

It trains in the main thread, so that a signal ends it between two steps; it leaves the roster,
saves its state, and goes on from there at the next start.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from types import FrameType

from atoll.coordinator.run.levels import LOGGING, Level
from atoll.coordinator.run.phases import RoundPhase
from atoll.peer.daemon.link import Link
from atoll.peer.daemon.membership import expect_run
from atoll.peer.daemon.reporting import TrainerView
from atoll.peer.daemon.session import LinkOptions
from atoll.peer.errors import SavedStateError
from atoll.peer.paths import PeerPaths
from atoll.peer.rounds.context import short
from atoll.peer.training.trainer import Trainer, TrainerOptions

STORED_S = 60.0  # at the end of a run: how long to wait for the coordinator to have it all
LOG_BYTES = 4 << 20
LOG_FILES = 3

_log = logging.getLogger("atoll")


@dataclass(frozen=True, kw_only=True)
class DaemonOptions:
    """What the owner of a peer decides."""

    link: LinkOptions
    device: str = "auto"
    data: str | None = None
    """path of the data on this machine, in place of the spec's"""
    share: float = 1.0
    """of the time to train; the rest is left to other programs"""


@dataclass(frozen=True, kw_only=True)
class DaemonEvent:
    """Something that a program which runs a peer may want to know."""

    kind: str
    """``event``, ``phase``, ``ready``, ``round`` (one that was decided) or ``stopped``"""
    position: int
    text: str
    level: Level = "info"
    left: int | None = None
    """of a phase that fetches: entries or leaves still to come"""


class PeerDaemon:
    """One peer in one run."""

    def __init__(self, options: DaemonOptions, *, on_event: Callable[[DaemonEvent], None]) -> None:
        """``on_event`` is called from several threads."""
        self._options = options
        self._on_event = on_event
        self._stopping = threading.Event()
        self._trainer: Trainer | None = None
        self._link: Link | None = None
        self._told_round = 0

    def stop(self) -> None:
        """End after the step in progress; from a signal handler or any thread."""
        self._stopping.set()
        if self._link is not None:
            self._link.reducer.stopping.set()
        if self._trainer is not None:
            self._trainer.stop()

    def run(self) -> bool:
        """Join, train, leave; True if the run is finished, False if it was told to stop.

        Raises:
            LinkError, CoordinatorError, SetupError: this peer cannot start as it was told to.
            TrainingFailed: it computes nothing but numbers that are not finite.
        """
        paths = PeerPaths(root=self._options.link.state_dir)
        expect_run(paths, self._options.link.invite.run_id)  # before a line of ours is in there
        with log_file(paths):
            try:
                self._link = Link.open(
                    self._options.link,
                    on_event=self._tell,
                    on_phase=self._tell_phase,
                    stopping=self._stopping,
                )
            except KeyboardInterrupt:
                return False
            try:
                return self._train(self._link, paths)
            finally:
                self._link.close()
                self._emit("stopped", "left the run")

    def _train(self, link: Link, paths: PeerPaths) -> bool:
        if self._stopping.is_set():  # the data of a run takes seconds to read
            return False
        spec = link.spec
        if self._options.data is not None:
            data = spec.data.model_copy(update={"source": self._options.data})
            spec = spec.model_copy(update={"data": data})
        self._trainer = trainer = Trainer(
            spec,
            link.reducer,
            TrainerOptions(
                peer_id=link.peer_id,
                device=self._options.device,
                position=link.position,
                validate_every=1,
                state_path=paths.trainer,
                save_every_s=60.0,
                share=self._options.share,
                paces_s=link.paces_s,
                is_over=lambda: 0 < spec.run.rounds <= link.position,
            ),
        )
        link.watch(lambda: view_of(trainer))
        self._resume(trainer, paths)
        if self._stopping.is_set():
            return False
        self._told_round = link.position
        self._emit("ready", self._introduction(link, trainer.statistics().device))
        trainer.run()
        if trainer.finished and not self._stopping.is_set():
            self._tell("info", f"the run has all its rounds, {link.position}")
            link.wait_until_stored(STORED_S, self._stopping)
        return trainer.finished

    def _resume(self, trainer: Trainer, paths: PeerPaths) -> None:
        if not paths.trainer.exists():
            return
        try:
            trainer.load(paths.trainer)
            self._tell("info", "inner optimizer and data position resumed")
        except SavedStateError as error:
            self._tell("warning", f"starting with a fresh inner optimizer: {error}")

    def _tell(self, level: Level, text: str) -> None:
        _log.log(LOGGING[level], text)
        self._emit("event", text, level)

    def _introduction(self, link: Link, device: str) -> str:
        me = f"{self._options.link.name or 'this peer'} ({short(link.peer_id)})"
        if link.position:
            return f"{me} trains on {device} after round {link.position}"
        peers = link.spec.round.min_peers
        start = f"{peers} peer{'' if peers == 1 else 's'}"
        return f"{me} trains on {device}; the run starts with {start}"

    def _tell_phase(self, phase: RoundPhase, position: int, *, left: int | None = None) -> None:
        self._on_event(DaemonEvent(kind="phase", position=position, text=phase, left=left))
        if phase is RoundPhase.TRAIN and position > self._told_round:
            self._told_round = position
            self._tell_round(position)

    def _tell_round(self, position: int) -> None:
        if self._trainer is None or self._link is None:
            return
        stats, rounds = self._trainer.statistics(), self._link.spec.run.rounds
        self._emit(
            "round",
            f"round {position}{f'/{rounds}' if rounds else ''}  loss {stats.loss:.3f}  "
            f"{stats.tokens_per_s:,.0f} tok/s  util {stats.utilisation:.1%}",
        )

    def _emit(self, kind: str, text: str, level: Level = "info") -> None:
        position = self._link.position if self._link is not None else 0
        self._on_event(DaemonEvent(kind=kind, position=position, text=text, level=level))


def view_of(trainer: Trainer) -> TrainerView:
    """What the link tells the others about a trainer."""
    stats = trainer.statistics()
    return TrainerView(
        ready_in_s=stats.ready_in_s,
        step_s=stats.pace_s,
        step=stats.step,
        inner_steps=stats.inner_steps,
        tokens=stats.tokens,
        tokens_per_s=stats.tokens_per_s,
        loss=_finite(stats.loss),
        valid_loss=_finite(stats.valid_loss),
        utilisation=stats.utilisation,
        device=stats.device,
    )


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[list[int]]:
    """SIGINT and SIGTERM stop cleanly; a second one ends at once.  Yields the signals received."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        stop()
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def log_file(paths: PeerPaths) -> Iterator[None]:
    """Write what is logged to the peer's file, asyncio's words on callbacks that failed too.

    They would go to the terminal otherwise, where hivemind's forgotten tasks tell a person nothing.
    """
    handler = RotatingFileHandler(
        paths.messages,
        maxBytes=LOG_BYTES,
        backupCount=LOG_FILES,
        encoding="utf-8",
        delay=True,  # until there is something to say: the directory is made, and locked, by then
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _log.setLevel(logging.INFO)
    loggers = (_log, logging.getLogger("asyncio"))
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
