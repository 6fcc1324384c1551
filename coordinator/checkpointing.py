"""Writing and removing checkpoints on schedule; each is a file, named by its position.

Only people need them: joining peers fetch snapshots, and the log replays to any position.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from atoll.coordinator.checkpoints import (
    Checkpoint,
    CheckpointError,
    delete_checkpoint,
    save_checkpoint,
)
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.replica import ReplicaStanding, ReplicaView
from atoll.optim.state.outer_state import OuterState, StateGone

logger = logging.getLogger(__name__)

MOVES_ON_S = 0.01  # between two looks at a replica that applies an entry, for ms to seconds
LANDMARK_EVERY = 10  # one checkpoint in this many is never removed: the run's course stays


class Checkpointing:
    """Writes checkpoints one after another, in threads."""

    def __init__(
        self,
        spec: RunSpec,
        replica: ReplicaView,
        folder: Path,
        report: Callable[[Level, str], None],
    ) -> None:
        """`report` logs an event for each checkpoint written or failed."""
        self._spec = spec
        self._replica = replica
        self._folder = folder
        self._report = report
        self._newest = self._newest_on_disk()
        self._writing: asyncio.Task[None] | None = None

    def path(self, position: int) -> Path:
        """Return the file of the checkpoint at a position."""
        return self._folder / f"{self._spec.run.name}-{position:08d}.safetensors"

    def last(self) -> Path | None:
        """Return the newest checkpoint on disk."""
        position = self._newest_on_disk()
        return self.path(position) if position >= 0 else None

    def look(self, *, last: bool = False) -> None:
        """Start a checkpoint if one is due at this position, or if it is the `last` one."""
        position, every = self._replica.head.position, self._spec.coordinator.checkpoint_every
        due = last or (every and position % every == 0)
        if not due or not self._replica.is_current or position in (0, self._newest):
            return
        self._newest = position
        # Never cancelled, and awaited by the next one or `close`: a checkpoint that begins is kept.
        self._writing = asyncio.create_task(self._write(self._writing))

    async def close(self) -> None:
        """Write the last checkpoint."""
        self.look(last=True)
        if self._writing is not None:
            await self._writing

    def _newest_on_disk(self) -> int:
        return max(self._on_disk(), default=-1)

    def _on_disk(self) -> list[int]:
        found = self._folder.glob(f"{self._spec.run.name}-{'[0-9]' * 8}.safetensors")
        return sorted(int(path.stem[-8:]) for path in found)

    async def _write(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before  # one at a time: each holds a copy of the model
        try:
            path = await asyncio.to_thread(self._write_state)
            self._report("info", f"checkpoint {path.name} written")
            await asyncio.to_thread(self._remove_old)
        except CheckpointError as error:
            self._report("error", str(error))
        except Exception as error:  # raised here, it would end every later checkpoint as well
            logger.exception("a checkpoint failed")
            self._report("error", f"no checkpoint written: {error!r}")

    def _write_state(self) -> Path:
        at, release = self._kept()
        try:
            checkpoint = Checkpoint(
                spec=self._spec,
                run_id=self._replica.run_id,
                epoch=at.head.epoch,
                position=at.head.position,
                chain=at.head.chain,
                state=_state_of(at),
            )
            path = self.path(at.head.position)
            save_checkpoint(path, checkpoint, on_read=release)
            return path
        finally:
            release()

    def _kept(self) -> tuple[ReplicaStanding, Callable[[], None]]:
        """Return where the replica stands, with a state that stays as it is until released."""
        while True:
            at = self._replica.standing  # read once: the log may move on meanwhile
            with suppress(StateGone):  # it has moved on: then there is another one soon
                return at, _state_of(at).keep()
            time.sleep(MOVES_ON_S)

    def _remove_old(self) -> None:
        settings = self._spec.coordinator
        if not settings.keep_checkpoints:
            return
        landmarks = LANDMARK_EVERY * max(1, settings.checkpoint_every)
        for position in self._on_disk()[: -settings.keep_checkpoints]:
            if position % landmarks:
                delete_checkpoint(self.path(position), self._replica.run_id)


def _state_of(at: ReplicaStanding) -> OuterState:
    if at.state is None:
        raise CheckpointError("no state to write yet")
    return at.state
