"""When a trainer's state is saved: now and then beside the training, and at its end."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from atoll.peer.training.ranks import OneRank
from atoll.peer.training.shards import Saver, Saving

SAVE_SHARE = 0.02  # of the time: for the copy in the trainer's thread, and for the disk beside it


class Saves:
    """Saves the state of a trainer; all ranks of a peer call each method together."""

    def __init__(
        self,
        path: Path | None,
        saver: Callable[[Path], Saver],
        state: Callable[[], Mapping[str, Any]],
        *,
        ranks: OneRank,
        every_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Begin without a save.

        Args:
            path: file that `when_due` writes; None for none.
            saver: returns what writes and reads a file, and the shards beside it.
            state: returns this rank's share of the state as it is now.
            ranks: the processes that train as this peer.
            every_s: seconds between two saves, at least.
            clock: returns seconds from any origin.
        """
        self._path, self._saver, self._state = path, saver, state
        self._ranks, self._every_s, self._clock = ranks, every_s, clock
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._saving: Saving | None = None
        self._saved_at_s = clock()
        self._after_s = 0.0
        """seconds after which one more keeps to `SAVE_SHARE`"""
        self.took_s = 0.0
        """seconds for which training stood still"""

    def save(self, path: Path) -> None:
        """Write the state to a file, atomically; training stands still meanwhile.

        Raises:
            OSError: the file cannot be written; an older one remains intact.
        """
        self._end()
        began_s = self._clock()
        saver = self._saver(path)
        saver.end(saver.begin(self._state(), self._writer))
        self._saved_at_s = self._clock()
        self.took_s += self._saved_at_s - began_s

    def when_due(self, *, at_window_end: bool) -> None:
        """Begin to save if it is time, and end a save that is written.

        Raises:
            OSError: a file cannot be written; an older one remains intact.
        """
        path = self._path
        if path is None:
            return
        if self._saving is not None and (at_window_end or self._ranks.size == 1):
            if self._saver(path).is_written(self._saving):
                self._end()  # it may have failed
        every_s = max(self._every_s, self._after_s)
        is_due = self._clock() - self._saved_at_s >= every_s and self._saving is None
        if at_window_end and self._ranks.agreed(is_due):
            self._begin(path)

    def close(self) -> None:
        """End the thread that writes, once it has written."""
        self._writer.shutdown()

    def _begin(self, path: Path) -> None:
        """Write the state; another thread brings it to the disk while training goes on."""
        began_s = self._clock()
        note = partial(self._note, began_s)
        self._saving = self._saver(path).begin(self._state(), self._writer, then=note)
        self._saved_at_s = self._clock()
        self.took_s += self._saved_at_s - began_s

    def _note(self, began_s: float) -> None:
        self._after_s = (self._clock() - began_s) / SAVE_SHARE

    def _end(self) -> None:
        """Wait for the save that is under way, if there is one; raise what it failed with."""
        saving, self._saving = self._saving, None
        if saving is not None:
            began_s = self._clock()
            assert self._path is not None, "it was begun there"
            self._saver(self._path).end(saving)
            self.took_s += self._clock() - began_s
