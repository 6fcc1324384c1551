"""Writing and removing checkpoints on schedule; each is a file, named by its position.

A pipeline has a log for each stage, and at one moment the stages stand at different positions. So
the states of all stages are taken together, when the last stage has held enough rounds, and each
file says at which positions the others were (`Checkpoint.moment`). The last stage's file is written
last: if it is there, the others are.

Only people need them: joining peers fetch snapshots, and the log replays to any position.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.coordinator import notices
from atoll.coordinator.checkpoints import (
    Checkpoint,
    CheckpointError,
    delete_checkpoint,
    read_header,
    save_checkpoint,
)
from atoll.coordinator.run.notice import Notice, Report
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.standing import ReplicaStanding, ReplicaView
from atoll.optim.state.outer_state import OuterState, StateGone

logger = logging.getLogger(__name__)

MOVES_ON_S = 0.01  # between two looks at a replica that applies an entry, for ms to seconds
LANDMARK_EVERY = 10  # one checkpoint in this many is never removed: the run's course stays


@dataclass(frozen=True)
class _HeldState:
    """Keeps a state as it is until it is released, and says where its log stood."""

    standing: ReplicaStanding
    release: Callable[[], None]


class Checkpointing:
    """Writes checkpoints of all modules, one set after another, in threads."""

    def __init__(
        self,
        spec: RunSpec,
        replicas: Mapping[str, ReplicaView],
        folders: Mapping[str, Path],
        report: Report,
        on_written: Callable[[Sequence[Path]], None] = lambda paths: None,
    ) -> None:
        """Continue after what is on disk.

        Args:
            spec: the run's.
            replicas: of the modules, by name and in order; a follower may have only some.
            folders: of their checkpoints.
            report: logs an event for each set that was written or failed.
            on_written: takes the files of each new set, by module, before any is removed.
        """
        self._spec = spec
        self._replicas = replicas
        self._folders = folders
        self._report = report
        self._on_written = on_written
        self._is_staged = len(spec.modules) > 1
        *_, self._lead = replicas
        """Its rounds say when a set is due; each set has a file of its own there."""
        self._newest = next(self._sets(), {})
        self._writing: asyncio.Task[None] | None = None

    def path(self, module: str, position: int) -> Path:
        """Return the file of a module's checkpoint at a position."""
        return self._folders[module] / f"{self._spec.run.name}-{position:08d}.safetensors"

    def last(self) -> Path | None:
        """Return the newest checkpoint on disk; of a pipeline that of the last stage."""
        position = max(self._on_disk(self._lead), default=None)
        return None if position is None else self.path(self._lead, position)

    def look(self, *, last: bool = False) -> None:
        """Start a set of checkpoints if one is due, or if it is the `last` one."""
        at = {name: replica.head.position for name, replica in self._replicas.items()}
        lead, every = at[self._lead], self._spec.coordinator.checkpoint_every
        is_due = every and lead % every == 0 and lead not in (0, self._newest.get(self._lead))
        if not (is_due or last) or not any(at.values()) or at == self._newest:
            return
        if not all(replica.is_current for replica in self._replicas.values()):
            return
        self._newest = at
        # Never cancelled, and awaited by the next one or `close`: a checkpoint that begins is kept.
        self._writing = asyncio.create_task(self._write(self._writing))

    @property
    def is_writing(self) -> bool:
        """Return whether a set is being written."""
        return self._writing is not None and not self._writing.done()

    async def close(self) -> None:
        """Write the last checkpoints."""
        self.look(last=True)
        if self._writing is not None:
            await self._writing

    def _sets(self) -> Iterator[Mapping[str, int]]:
        """Yield the positions of each set on disk, from the newest one on."""
        for position in reversed(self._on_disk(self._lead)):
            if not self._is_staged:
                yield {self._lead: position}
                continue
            with suppress(CheckpointError):
                moment = read_header(self.path(self._lead, position)).moment
                if self._replicas.keys() <= moment.keys():
                    yield moment

    def _on_disk(self, module: str) -> list[int]:
        found = self._folders[module].glob(f"{self._spec.run.name}-{'[0-9]' * 8}.safetensors")
        return sorted(int(path.stem[-8:]) for path in found)

    async def _write(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before  # one at a time: each holds a copy of the model
        try:
            at = await asyncio.to_thread(self._write_states, await self._kept())
            self._report("info", self._told(at))
            self._on_written([self.path(*each) for each in at.items()])
            await asyncio.to_thread(self._remove_old)
        except CheckpointError as error:
            self._report("error", notices.checkpoint_failed(reason=str(error)))
        except Exception as error:  # raised here, it would end every later checkpoint as well
            logger.exception("a checkpoint failed")
            text = f"no checkpoint written: {error!r}"
            self._report("error", notices.checkpoint_failed(reason=text))

    async def _kept(self) -> Mapping[str, _HeldState]:
        """Keep the states of all modules as they are at one moment, each until it is released."""
        while True:
            held = dict[str, _HeldState]()
            try:
                for name, replica in self._replicas.items():
                    at = replica.standing  # read once: the log may move on meanwhile
                    held[name] = _HeldState(at, _state_of(at).keep())
            except StateGone:  # it has moved on: then there is another one soon
                _release(held)
                await asyncio.sleep(MOVES_ON_S)
            except CheckpointError:
                _release(held)
                raise
            else:
                return held

    def _write_states(self, held: Mapping[str, _HeldState]) -> Mapping[str, int]:
        """Write a set of states, and release each; return their positions."""
        try:
            at = {name: each.standing.head.position for name, each in held.items()}
            for name, each in held.items():
                moment = at if self._is_staged else {}
                self._write_state(name, each.standing, moment, each.release)
        finally:
            _release(held)
        return at

    def _told(self, at: Mapping[str, int]) -> Notice:
        if not self._is_staged:
            position = at[self._lead]
            file = self.path(self._lead, position).name
            return notices.checkpoint_written(file=file, round=position)
        stages = None if len(at) == len(self._spec.modules) else list(at)
        return notices.stages_written(rounds=tuple(at.values()), stages=stages)

    def _write_state(
        self,
        module: str,
        at: ReplicaStanding,
        moment: Mapping[str, int],
        release: Callable[[], None],
    ) -> None:
        checkpoint = Checkpoint(
            spec=self._spec,
            run_id=self._replicas[module].run_id,
            epoch=at.head.epoch,
            position=at.head.position,
            chain=at.head.chain,
            state=_state_of(at),
            moment=moment,
        )
        save_checkpoint(self.path(module, at.head.position), checkpoint, on_read=release)

    def _remove_old(self) -> None:
        """Remove files of no set that stays: the newest ones, and landmarks."""
        settings = self._spec.coordinator
        if not settings.keep_checkpoints:
            return
        landmarks = LANDMARK_EVERY * max(1, settings.checkpoint_every)
        stay = [
            each
            for age, each in enumerate(self._sets())
            if age < settings.keep_checkpoints or each[self._lead] % landmarks == 0
        ]
        for module, replica in self._replicas.items():
            for position in set(self._on_disk(module)) - {each[module] for each in stay}:
                delete_checkpoint(self.path(module, position), replica.run_id)


def _release(held: Mapping[str, _HeldState]) -> None:
    for each in held.values():
        each.release()


def _state_of(at: ReplicaStanding) -> OuterState:
    if at.state is None:
        raise CheckpointError("no state to write yet")
    return at.state
