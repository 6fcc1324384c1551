"""Copies of a simulated coordinator: a target that fails in the middle, and a new machine from it.

Copying and restoring are the coordinator's own code, on a file system in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec

from atoll.coordinator.copies.owners import expect_newest, expect_own, newest_with_copies
from atoll.coordinator.copies.restoring import find, restore
from atoll.coordinator.copies.sealing import RecoveryKey
from atoll.coordinator.copies.target import CopyDamaged, NotOurs, Target, TargetFailed


class HuntTarget(Target):
    """A target as one machine reaches it, which may be cut off or take only some more objects."""

    takes: int | None = None
    """how many; None takes all"""
    is_cut = False

    def __init__(self, name: str) -> None:
        """Make a target with a name of its own."""
        self._name = f"memory://{name}"
        super().__init__(self._name)

    def close(self) -> None:
        """Forget what it holds."""
        files = fsspec.filesystem("memory")
        if files.exists(self._name):
            files.rm(self._name, recursive=True)

    def _write(self, name: str, chunks: Iterable[bytes]) -> None:
        if self.takes is not None:
            if not self.takes:
                raise TargetFailed(f"{self.url}: {name} cannot be written: it does not answer")
            self.takes -= 1
        super()._write(name, chunks)

    @contextmanager
    def _telling(self, name: str, done: str) -> Iterator[None]:
        if self.is_cut:
            raise TargetFailed(f"{self.url}: {name} cannot be {done}: it cannot be reached")
        with super()._telling(name, done):
            yield


def has_copy(target: Target) -> bool:
    """Return whether a new machine can begin with a copy."""
    return bool(newest_with_copies(target))


def expect_current(target: Target, state_dir: Path) -> None:
    """Check, before a coordinator starts, that nobody has restored its run elsewhere.

    A target that cannot be reached, or holds no copies of this directory, is no reason to wait.

    Raises:
        Superseded: somebody has.
    """
    with suppress(TargetFailed, NotOurs):
        if own := expect_own(target, state_dir):
            expect_newest(target, RecoveryKey.of(state_dir), own)


def restore_newest(target: Target, key: RecoveryKey, folder: Path, *, is_damaged: bool) -> None:
    """Fill a new machine's folder as `atoll coordinator --restore` does.

    Args:
        target: holds the copies.
        key: with which they were sealed.
        folder: empty.
        is_damaged: whether the disk that was copied had shown wrong bytes; the one before may be
            taken then, as the message says.

    Raises:
        CopiesError: there is none that is whole.
    """
    try:
        restore(target, key, find(target, key), folder)
    except CopyDamaged:
        if not is_damaged:
            raise
        restore(target, key, find(target, key, older=True), folder)
