"""The saved progress of a trainer: one file a rank, of which the first rank's counts.

    trainer.safetensors                 the first rank's share, and how many shards there are
    trainer.SAVE.RANK.safetensors       the parts of tensors that another rank keeps

SAVE is a random name, new at each save. The first rank's file takes its place when all shards are
on disk, and older ones go after that: so whatever ends a save, the state before it is whole. Each
shard is read by one rank that finds it, its own if it can, and given to the others; ranks on
several machines need no common disk while their number stays.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.optim.state.parts import TensorPart, parts_of
from atoll.peer.errors import SavedStateError
from atoll.peer.training import saved
from atoll.peer.training.ranks import OneRank

KIND, SHARD = "trainer", "trainer-shard"


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A save that is under way on all ranks."""

    begun: saved.Begun
    name: str
    written: Future[None]
    """Done when this rank's file is on disk."""


class Saver:
    """Writes and reads a trainer's state; all ranks call each method together."""

    def __init__(self, path: Path, ranks: OneRank, *, run: str, older: str = "") -> None:
        """Keep the state of a run in a file, and beside it; digests are those of `saved.load`."""
        self._path, self._ranks, self._run, self._older = path, ranks, run, older

    def begin(
        self,
        state: Mapping[str, Any],
        writer: Executor,
        *,
        then: Callable[[], None] = lambda: None,
    ) -> Saving:
        """Write this rank's share as it is now; the writer brings it to the disk.

        Args:
            state: this rank's share.
            writer: a thread.
            then: called there once that is done.

        Raises:
            OSError: it cannot be written.
        """
        ranks = self._ranks
        name = ranks.agreed(secrets.token_hex(4))
        if ranks.leads:
            tree = dict(state) | ({"shards": [name, ranks.size]} if ranks.size > 1 else {})
            begun = saved.begin(self._path, tree, kind=KIND, run=self._run)
        else:
            path = self._shard(name, ranks.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            begun = saved.begin(path, {"parts": parts_of(state)}, kind=SHARD, run=self._run)
        # The first of several files counts only when the others are there.
        write = saved.seal if ranks.leads and ranks.size > 1 else saved.finish

        def finish() -> None:
            write(begun)
            then()

        return Saving(begun=begun, name=name, written=writer.submit(finish))

    def is_written(self, saving: Saving) -> bool:
        """Return whether the files of all ranks are on disk, or this one's failed."""
        return self._ranks.all_of(saving.written.done())

    def end(self, saving: Saving) -> None:
        """Wait for all files, let them count, and remove the shards before them.

        Raises:
            OSError: this rank's could not be written; the state before is whole.
        """
        saving.written.result()
        if self._ranks.size > 1:
            self._ranks.all_of(True)  # a rank that failed is not here
            with self._ranks.leading():
                if self._ranks.leads:
                    saved.put(saving.begun)
            self._ranks.agreed(None)
        self._remove_shards(but=saving.name)

    def load(self) -> tuple[dict[str, Any], dict[int, Sequence[TensorPart]]]:
        """Return the first rank's tree, empty elsewhere, and the other shards that were read here.

        Raises:
            SavedStateError: a file is missing, damaged, or of another run.
        """
        ranks, state, failure = self._ranks, dict[str, Any](), ""
        with ranks.leading():
            if ranks.leads:
                try:
                    state = self._read(self._path, KIND)
                except SavedStateError as error:
                    failure = str(error)
        failure, name, count = ranks.agreed([failure, *state.pop("shards", ["", 1])])
        if failure:
            raise SavedStateError(failure)
        read = dict[int, Sequence[TensorPart]]()
        if count > 1:
            expected = ranks.agreed(len(parts_of(state)))
            try:
                for shard in self._assigned(name, count):
                    tree = self._read(self._shard(name, shard), SHARD)
                    read[shard] = tree["parts"]
                    if len(tree["parts"]) != expected:
                        raise SavedStateError(f"{self._shard(name, shard)} is of another state")
            except SavedStateError as error:
                failure = str(error)
            failures = [each for each in ranks.gathered(failure) if each]
            if failure := ranks.agreed(failures[0] if failures else ""):
                raise SavedStateError(failure)
        return state, read

    def _read(self, path: Path, kind: str) -> dict[str, Any]:
        return saved.load(path, kind=kind, run=self._run, older=self._older)

    def _assigned(self, name: str, count: int) -> list[int]:
        """Return the shards that this rank is to read: its own, and those that are only here.

        Raises:
            SavedStateError: a shard is on none of the machines.
        """
        ranks = self._ranks
        here = [shard for shard in range(1, count) if self._shard(name, shard).exists()]
        places = dict[int, int]()
        for rank, shards in enumerate(ranks.gathered(here)):
            places |= {shard: rank for shard in shards if rank == shard or shard not in places}
        readers = ranks.agreed([places.get(shard) for shard in range(1, count)])
        if None in readers:
            raise SavedStateError(
                f"{self._path} is the first of {count} shards, and number "
                f"{readers.index(None) + 2} is on no machine of this peer; start it again with "
                f"{count} processes where it was saved"
            )
        return [shard for shard, reader in enumerate(readers, start=1) if reader == ranks.rank]

    def _remove_shards(self, *, but: str) -> None:
        stem, suffix = re.escape(self._path.stem), re.escape(self._path.suffix)
        pattern = re.compile(rf"{stem}\.([0-9a-f]{{8}})\.\d+{suffix}(\.partial)?")
        for file in self._path.parent.iterdir():
            match = pattern.fullmatch(file.name)
            if match is not None and match[1] != but:
                file.unlink(missing_ok=True)

    def _shard(self, name: str, rank: int) -> Path:
        return self._path.with_name(f"{self._path.stem}.{name}.{rank}{self._path.suffix}")
