"""A coordinator's directory from the folder of a follower, and a copy of the run's keys.

A follower has the whole log, of a pipeline those of all stages unless its owner named some, the
states and the records, and none of the coordinator's secrets.
With `keys.json` from a backup the run goes on with the same invite. Small files that lie beside
that copy, such as issued invites, are taken too; without them, only the first invite is valid.

What holds for a restored copy holds here (`restoring`): epochs' numbers are skipped, and no epoch
opens before the peers have said which is their newest. The follower may run meanwhile.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.coordinator.copies.beside import spec_to_start_with, tell_restored
from atoll.coordinator.copies.restoring import expect_new, made_whole, skip_numbers
from atoll.coordinator.copies.sealing import RECOVERY_FILE
from atoll.coordinator.copies.target import CopiesError
from atoll.coordinator.first_state import ROOT_FILE
from atoll.coordinator.invites import INVITES_FILE, USES_FILE
from atoll.coordinator.orders import ORDERS_FILE
from atoll.coordinator.recorded import FOLLOWER_FILE
from atoll.coordinator.relocating import RELOCATION_FILE
from atoll.coordinator.run.files import keep_known_peers, replace_private
from atoll.coordinator.run.keys import KEYS_FILE, RunKeys
from atoll.coordinator.run.spec import RunSpec, run_id
from atoll.coordinator.run.spec_problems import SpecError
from atoll.coordinator.service.server import TOKENIZER_FILE, LogFiles
from atoll.coordinator.signing import SIGNED_FILE
from atoll.optim.log.module import WHOLE, log_id
from atoll.optim.log.store import LOG_FILE, LogStore
from atoll.optim.log.store_errors import StoreError

BESIDE_KEYS = (INVITES_FILE, USES_FILE, ORDERS_FILE, RECOVERY_FILE, SIGNED_FILE, "node.key")
TRIES = 5  # of copying the snapshots of a follower that runs, and replaces them


def is_followers(place: str) -> bool:
    """Return whether a place is the folder of a follower."""
    folder = Path(place)
    is_named = len(place) <= 255 and (folder / FOLLOWER_FILE).is_file()
    return is_named and (folder / "spec.json").is_file() and not (folder / KEYS_FILE).exists()


@dataclass(frozen=True, kw_only=True)
class FollowerToRestore:
    """The folder of a follower that becomes a state directory."""

    spec: RunSpec
    """The coordinator shall start with this one."""
    folder: Path
    keys: Path

    @classmethod
    def found(
        cls, folder: Path, keys: Path, spec_file: Path | None, *, state_dir: Path | None
    ) -> FollowerToRestore:
        """Check what is there; nothing is written.

        Args:
            folder: the follower's.
            keys: a copy of the run's keys.json.
            spec_file: RUN.toml with other settings of the coordinator; by default the folder's.
            state_dir: into which it will be restored, if that is known.

        Raises:
            CopiesError: the folder or the keys are of another run, or damaged.
            KeysError, SpecError: a file is damaged.
        """
        if state_dir is not None:
            expect_new(state_dir)
        if not keys.is_file():
            raise CopiesError(
                f"{keys}: no such file; pass --keys with a copy of the former coordinator's "
                f"{KEYS_FILE}, without which nobody can continue the run"
            )
        try:
            kept = RunSpec.from_json((folder / "spec.json").read_bytes())
        except SpecError as error:
            raise CopiesError(f"{folder}: this version of Atoll cannot read it: {error}") from None
        lacking = [name for name in kept.modules if not LogFiles(folder, b"", name).has_log]
        if lacking and kept.modules != (WHOLE,):
            raise CopiesError(
                f"{folder}: it has followed some stages alone and lacks {', '.join(lacking)}; pass "
                "the folder of a follower of all stages, or a copy of the coordinator's"
            )
        own = bytes.fromhex(run_id(kept, RunKeys.load_or_create(keys).run_public_key))
        for name in kept.modules:
            if _log_id(folder, name) != log_id(own, name):
                raise CopiesError(
                    f"{keys}: expected the keys of the run that {folder} has followed, got those "
                    "of another run; pass the keys.json of its coordinator"
                )
        return cls(spec=spec_to_start_with(kept, spec_file, str(folder)), folder=folder, keys=keys)

    def restore(self, spec: RunSpec, state_dir: Path, say: Callable[[str], None]) -> None:
        """Make the directory, with a RUN.toml for its next start; `say` gets what people need.

        Raises:
            CopiesError: the folder is damaged; nothing stays behind.
            OSError: the disk takes no more; nothing stays behind.
        """
        with made_whole(state_dir) as partial:
            try:
                positions = self._fill(partial)
            except (sqlite3.DatabaseError, StoreError) as error:
                raise CopiesError(f"{self.folder}: {error}; take another follower's") from None
        tell_restored(spec, positions, state_dir, say)

    def _fill(self, partial: Path) -> list[int]:
        """Copy everything; return the positions of the logs."""
        modules = [name for name in self.spec.modules if name != WHOLE]
        roots = [LogFiles(self.folder, b"", name).file(ROOT_FILE) for name in modules]
        for name in ("spec.json", ROOT_FILE, TOKENIZER_FILE, *(root.name for root in roots)):
            if (self.folder / name).exists():
                replace_private(partial / name, (self.folder / name).read_bytes())
        replace_private(partial / KEYS_FILE, self.keys.read_bytes())
        beside_keys = [*BESIDE_KEYS, *(f"{name}.{SIGNED_FILE}" for name in modules)]
        for name in beside_keys:
            beside = self.keys.parent / name
            if beside.is_file():
                replace_private(partial / name, beside.read_bytes())
        kept = _kept(self.folder)
        if record := _last_place(kept):
            replace_private(partial / RELOCATION_FILE, record)  # the next one counts more
        if addresses := _known_addresses(kept):
            keep_known_peers(partial, addresses)
        # Events of the whole run; in a dense run, the rounds as well.
        _copy_database(self.folder / "history.db", partial / "history.db")
        return [self._fill_log(partial, name) for name in self.spec.modules]

    def _fill_log(self, partial: Path, module: str) -> int:
        """Copy what belongs to one log; return its position."""
        source, files = (LogFiles(place, b"", module) for place in (self.folder, partial))
        if module != WHOLE:
            _copy_database(source.file("history.db"), files.file("history.db"))
        _copy_log(source.folder, files.folder)
        with closing(LogStore.reading(files.folder)) as store:
            skip_numbers(files.file(SIGNED_FILE), [epoch for epoch, _ in store.epochs()])
            return store.head.position


def _last_place(kept: dict[str, Any]) -> bytes:
    """Return the newest relocation that a follower knew; empty without one."""
    with suppress(ValueError, TypeError):
        return bytes.fromhex(kept.get("relocation", ""))
    return b""


def _known_addresses(kept: dict[str, Any]) -> list[str]:
    """Return the multiaddrs of nodes that a follower has kept, the former coordinator's first."""
    addresses = kept.get("bootstrap", [])
    texts = addresses if isinstance(addresses, list) else []
    return [text for text in texts if isinstance(text, str)]


def _kept(folder: Path) -> dict[str, Any]:
    """Return what a follower keeps for its next start; empty if that is damaged."""
    with suppress(OSError, ValueError):
        kept = json.loads((folder / FOLLOWER_FILE).read_bytes())
        return kept if isinstance(kept, dict) else {}
    return {}


def _log_id(folder: Path, module: str) -> bytes:
    try:
        with closing(LogStore.reading(LogFiles(folder, b"", module).folder)) as store:
            return store.run_id
    except (StoreError, sqlite3.Error) as error:
        raise CopiesError(f"{folder}: {error}; take another follower's") from None


def _copy_log(source: Path, into: Path) -> None:
    """Copy a log with its snapshots; a follower that runs may replace some meanwhile."""
    into.mkdir()
    for _ in range(TRIES):
        _copy_database(source / LOG_FILE, into / LOG_FILE)
        with closing(LogStore.reading(into)) as store:
            files = [store.snapshot(position).path.name for position in store.snapshot_positions()]
        try:
            for name in files:
                if not (into / name).exists():
                    shutil.copyfile(source / name, into / name)
        except FileNotFoundError:
            continue
        return
    raise StoreError("its snapshots change faster than they can be copied")


def _copy_database(source: Path, into: Path) -> None:
    """Copy a database that another process may be writing."""
    uri = f"{source.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as there, closing(sqlite3.connect(into)) as here:
        there.backup(here)
