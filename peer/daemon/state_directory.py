"""Checks of a peer's state directory, before anything is written there, and what it keeps.

Errors:

    StateDirectoryError (ValueError)
     +-- StateDirectoryInUse       another peer runs on the same state directory
     +-- StateDirectoryUnusable    the state directory cannot be made, read or written
     +-- StateOfAnotherRun         the state directory belongs to another run
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from atoll.coordinator.run.keys import KEYS_FILE
from atoll.peer.paths import PeerPaths

LEAVING = b"leaving"  # in the lock's file


class StateDirectoryError(ValueError):
    """A peer cannot start with this state directory."""


class StateDirectoryInUse(StateDirectoryError):
    """Another process works in the state directory."""


class StateDirectoryUnusable(StateDirectoryError):
    """The state directory cannot be made, read or written."""


class StateOfAnotherRun(StateDirectoryError):
    """The state directory holds another run."""


def expect_run(paths: PeerPaths, run_id: bytes) -> None:
    """Check that a directory holds no state but that of a run; change nothing.

    Raises:
        StateOfAnotherRun: it holds the state of another run, or something that is no run.
        StateDirectoryUnusable: it cannot be read, or is a coordinator's.
    """
    with usable(paths):
        if (paths.root / KEYS_FILE).exists():
            raise StateDirectoryUnusable(
                f"{paths.root}: expected a folder for this peer alone, got that of a coordinator; "
                "give this peer another directory with --state-dir"
            )
        if not paths.run.exists():
            return
        raw = paths.run.read_bytes()
    try:
        stored = str(json.loads(raw)["run_id"])
    except (ValueError, KeyError, TypeError):
        raise not_a_run(paths) from None
    if stored != run_id.hex():
        raise StateOfAnotherRun(
            f"{paths.root}: expected the state of run {run_id.hex()[:12]}, got "
            f"that of run {stored[:12]}; give this peer another directory with --state-dir"
        )


def note_leaving(paths: PeerPaths) -> None:
    """Let who starts this peer again know that its lock will be free soon: nobody trains here."""
    if not paths.lock.stat().st_size:  # else it is somebody's file
        paths.lock.write_bytes(LEAVING)


def is_being_left(paths: PeerPaths) -> bool:
    """Return whether the lock is held by a network process whose trainer was killed."""
    return paths.lock.read_bytes() == LEAVING


def delete_others(paths: PeerPaths, modules: Collection[str], served: str) -> None:
    """Delete the logs and the saved progress of the run's modules that this peer does not serve.

    What is left by a process that was killed meanwhile is deleted at the next call.

    Args:
        paths: of this peer.
        modules: of the run; nothing else is deleted.
        served: the module of which everything stays.

    Raises:
        OSError: something cannot be deleted.
    """
    for module in set(modules) - {served}:
        if paths.log(module).exists():
            shutil.rmtree(paths.log(module))
        for path in paths.root.glob(f"{module}.*"):
            path.unlink()


@contextmanager
def usable(paths: PeerPaths) -> Iterator[None]:
    """Raise StateDirectoryUnusable for what the system refuses in the block."""
    try:
        yield
    except OSError as error:
        raise StateDirectoryUnusable(
            f"{paths.root}: expected a folder that this peer can write, got "
            f"{error.strerror or error!r}; give this peer another directory with --state-dir"
        ) from None


def not_a_run(paths: PeerPaths) -> StateOfAnotherRun:
    """Return the error of a description of a run that is none."""
    return StateOfAnotherRun(
        f"{paths.run}: expected the description of a run, got something else; "
        "give this peer another directory with --state-dir"
    )
