"""Trackers of experiments, fed with what rounds bring: TensorBoard and Weights & Biases.

    with tracked(["tensorboard:runs/tb", "wandb"], name="attic", on_trouble=print) as track:
        track(37, {"loss": 1.42, "tokens_per_s": 52_500.0})

A tracker never slows or stops a run. It works in a thread of its own, behind a short queue, whose
oldest numbers give way when it is slow; after its first failure, of which `on_trouble` hears once,
it is left. At the end it has `CLOSE_S` to finish.

    TrackError (ValueError)    an unknown tracker, or a folder that cannot be written
"""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from atoll.coordinator.run.notice import Notice
from atoll.peer import notices
from atoll.peer.extras import extra

MAX_WAITING = 256  # rounds: a service that hangs for an hour loses some, and costs 100 kB
CLOSE_S = 10.0  # for what is left to send; the run does not wait longer for it

Numbers = Mapping[str, float | None]
Track = Callable[[int, Numbers], None]
"""Takes a round and its numbers; None is left out."""


_END: tuple[int, Mapping[str, float]] = (-1, {})


class TrackError(ValueError):
    """The tracker is unknown, or cannot write where it should."""


class Writer(Protocol):
    """A tracker's own interface."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Note the numbers of a round; may block, may raise anything."""
        ...

    def close(self) -> None:
        """Finish; may block, may raise anything."""
        ...


def check(told: str) -> str:
    """Return the tracker that an option names, if its package and its folder are there.

    Raises:
        TrackError: it is none.
        ExtraMissing: the package is not installed.
    """
    kind, colon, where = told.partition(":")
    if kind == "tensorboard" and where:
        extra("tensorboard", "--track tensorboard")
        folder = Path(where).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrackError(
                f"--track {told}: {error.strerror}; choose a folder that can be written"
            ) from None
    elif kind == "wandb" and (where or not colon):
        extra("wandb", "--track wandb")
    else:
        raise TrackError(
            f"--track {told!r}: expected tensorboard:DIR, wandb or wandb:PROJECT; pass one of them"
        )
    return told


def open_writer(told: str, name: str) -> Writer:
    """Return a tracker's interface; may block, may raise anything."""
    kind, _, where = told.partition(":")
    if kind == "tensorboard":
        return _TensorBoard(Path(where).expanduser(), name)
    return _Wandb(where or "atoll", name)


@contextmanager
def tracked(
    trackers: Sequence[str],
    *,
    name: str,
    on_trouble: Callable[[Notice], None],
    open_one: Callable[[str, str], Writer] = open_writer,
) -> Iterator[Track]:
    """Yield what passes the numbers of rounds to these trackers while the block runs.

    Args:
        trackers: from `check`.
        name: of what is tracked.
        on_trouble: hears of a tracker's first failure; called in its thread.
        open_one: opens a tracker of a name; called in its thread.
    """
    lines = [_TrackerThread(told, name, on_trouble, open_one) for told in trackers]

    def track(step: int, numbers: Numbers) -> None:
        known = {key: float(value) for key, value in numbers.items() if value is not None}
        for line in lines:
            line.put(step, known)

    try:
        yield track
    finally:
        for line in lines:
            line.end()
        for line in lines:
            line.join()


class _TrackerThread:
    """A tracker in its thread."""

    def __init__(
        self,
        told: str,
        name: str,
        on_trouble: Callable[[Notice], None],
        open_one: Callable[[str, str], Writer],
    ) -> None:
        self._told, self._name = told, name
        self._on_trouble, self._open_one = on_trouble, open_one
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]]] = queue.Queue(MAX_WAITING)
        # A daemon: a tracker that hangs may not keep the process.
        self._thread = threading.Thread(target=self._work, name="atoll-track", daemon=True)
        self._thread.start()

    def put(self, step: int, numbers: Mapping[str, float]) -> None:
        """Pass numbers on; never waits."""
        while True:
            try:
                self._waiting.put_nowait((step, numbers))
                return
            except queue.Full:
                with suppress(queue.Empty):
                    self._waiting.get_nowait()

    def end(self) -> None:
        """Let the tracker finish."""
        self.put(*_END)

    def join(self) -> None:
        """Wait for it, but not for long."""
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        try:
            writer = self._open_one(self._told, self._name)
            while (item := self._waiting.get()) != _END:
                writer.write(*item)
            writer.close()
        except BaseException as error:  # whatever a tracker raises, SystemExit included
            text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self._on_trouble(notices.tracker_failed(tracker=self._told, reason=text))
            while self._waiting.get() != _END:
                pass  # nobody reads them any more, and the queue stays short


class _TensorBoard:
    """TensorBoard's files of events, without torch.utils or TensorFlow."""

    def __init__(self, folder: Path, name: str) -> None:
        events: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._pb: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._file = events.EventFileWriter(str(folder / _plain(name)))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self._summary.Summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]
        summary = self._summary.Summary(value=values)
        self._file.add_event(self._pb.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._file.close()


class _Wandb:
    """A run of Weights & Biases; its own settings say where it goes (`wandb login`, WANDB_MODE)."""

    def __init__(self, project: str, name: str) -> None:
        wandb: Any = importlib.import_module("wandb")
        settings = wandb.Settings(silent=True, console="off", disable_git=True)
        self._run = wandb.init(project=project, name=name, settings=settings)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def _plain(name: str) -> str:
    """A name as that of a folder."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip(".") or "atoll"
