"""When a run's checkpoints are written and removed, and where: beside its log, a file a position.

Nobody but people needs them: joiners fetch snapshots, and the log replays to any position.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from atoll.coordinator.checkpoints import (
    Checkpoint,
    CheckpointError,
    delete_checkpoint,
    save_checkpoint,
)
from atoll.coordinator.follower import Follower
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.spec import RunSpec

LANDMARK_EVERY = 10  # checkpoints, of which one stays for good


class Checkpointing:
    """Writes checkpoints one after another, off the loop."""

    def __init__(
        self, spec: RunSpec, follower: Follower, folder: Path, say: Callable[[Level, str], None]
    ) -> None:
        """`say` is told what was written, and what could not be."""
        self._spec = spec
        self._follower = follower
        self._folder = folder
        self._say = say
        self._newest = self._newest_on_disk()
        self._writing: asyncio.Task[None] | None = None

    def path(self, position: int) -> Path:
        """Where the checkpoint of a position is."""
        return self._folder / f"{self._spec.run.name}-{position:08d}.safetensors"

    def last(self) -> Path | None:
        """The newest checkpoint on disk."""
        position = self._newest_on_disk()
        return self.path(position) if position >= 0 else None

    def look(self, *, last: bool = False) -> None:
        """Begin to write where the position asks for it, or as it is the `last` one."""
        position, every = self._follower.head.position, self._spec.coordinator.checkpoint_every
        due = last or (every and position % every == 0)
        if not due or not self._follower.is_current or position in (0, self._newest):
            return
        self._newest = position
        self._writing = asyncio.create_task(self._write(self._writing))

    async def close(self) -> None:
        """Write the last one."""
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
            await before
        try:
            path = await asyncio.to_thread(self._write_state)
            self._say("info", f"checkpoint {path.name} written")
            await asyncio.to_thread(self._remove_old)
        except CheckpointError as error:
            self._say("error", str(error))

    def _write_state(self) -> Path:
        head, state = self._follower.head_and_state()
        checkpoint = Checkpoint(
            spec=self._spec,
            run_id=self._follower.run_id,
            epoch=head.epoch,
            position=head.position,
            chain=head.chain,
            state=state,
        )
        path = self.path(head.position)
        save_checkpoint(path, checkpoint)
        return path

    def _remove_old(self) -> None:
        settings = self._spec.coordinator
        if not settings.keep_checkpoints:
            return
        landmarks = LANDMARK_EVERY * max(1, settings.checkpoint_every)
        for position in self._on_disk()[: -settings.keep_checkpoints]:
            if position % landmarks:
                delete_checkpoint(self.path(position), self._follower.run_id)
