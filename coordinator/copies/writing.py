"""One copy of a run: what is new since the last one, then its manifest, then `latest`.

Everything here blocks, and reads what other threads write: files that are replaced whole, and
stores that give rows of 1 MiB under their lock. Nothing is read for longer than a row, so no round
waits.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from atoll.coordinator.copies import manifest as manifests
from atoll.coordinator.copies.archive import (
    GROUP,
    CopiedRound,
    pack_epochs,
    pack_rounds,
    packed,
    snapshot_chunks,
)
from atoll.coordinator.copies.manifest import CopiedModule, Manifest, put_manifest, read_manifest
from atoll.coordinator.copies.owners import (
    OWNER_FILE,
    claim,
    expect_newest,
    expect_own,
    keep_owner,
    newest_with_copies,
    owners,
    read_owner,
)
from atoll.coordinator.copies.sealing import RECOVERY_FILE, RecoveryKey
from atoll.coordinator.copies.target import (
    CopyDamaged,
    CopyObject,
    NotOurs,
    Target,
    TargetFailed,
    is_full,
)
from atoll.coordinator.history import History
from atoll.coordinator.relocating import ELSEWHERE_FILE, RELOCATION_FILE, RESTORE_FILE
from atoll.coordinator.service.server import LogFiles
from atoll.optim.log.entry import sha256
from atoll.optim.log.store import LogStore
from atoll.optim.log.store_errors import NotStored
from atoll.optim.log.stored_snapshots import SnapshotInfo

MAX_FILE_BYTES = 16 << 20  # a tokenizer of 4 MiB is the largest; the log is copied by itself
LEFT_BEHIND = frozenset(
    {"lock", OWNER_FILE, RECOVERY_FILE, RELOCATION_FILE, RESTORE_FILE, ELSEWHERE_FILE}
)
"""Files of one directory alone."""


@dataclass(frozen=True, kw_only=True)
class CopiedLog:
    """A log to copy."""

    store: LogStore
    files: LogFiles
    is_logged: bool
    """False in a gossip run, whose states have no log."""


@dataclass(frozen=True, kw_only=True)
class WrittenCopy:
    """A copy that is whole."""

    positions: tuple[int, ...]
    """Of each module."""
    wire_bytes: int
    """Written for it, also by tries that failed."""
    is_new: bool = True
    """False if nothing had changed since the one before."""


class CopyWriter:
    """Writes the copies of one coordinator's directory."""

    def __init__(
        self,
        target: Target,
        key: RecoveryKey,
        *,
        run_id: str,
        run_name: str,
        state_dir: Path,
        logs: Sequence[CopiedLog],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Write into the folder of the directory's owner; nothing is read or written yet.

        Args:
            target: the copies'.
            key: seals them.
            run_id: hex, of the run.
            run_name: its name.
            state_dir: whose small files are copied.
            logs: of the run's modules.
            clock: returns seconds since 1970.
        """
        self.moved_s = time.monotonic()
        """When the target last took anything."""
        self._target, self._key, self._owner = target, key, ""
        self._run_id, self._run_name = run_id, run_name
        self._state_dir, self._logs, self._clock = state_dir, logs, clock
        # A look between the claim of a new owner and the note of it would take it for another's.
        self._beginning = threading.Lock()
        self._name = ""
        """Of the newest manifest."""
        self._newest: Manifest | None = None
        self._before: Manifest | None = None
        self._known: dict[str, CopyObject] = {}
        self._written: list[CopyObject] = []

    def _begin(self) -> None:
        """Become an owner if the directory is none, and learn what the target holds of it."""
        owner = expect_own(self._target, self._state_dir)
        if not owner:
            owner = claim(
                self._target,
                self._key,
                run_id=self._run_id,
                run_name=self._run_name,
                after=read_owner(self._state_dir),
            )
            keep_owner(self._state_dir, owner)
        self._resume(owner)
        self._owner = owner

    def _resume(self, owner: str) -> None:
        name = self._latest(owner)
        self._newest = self._read(name)
        if self._newest is None:  # the first copy of this owner: name the one it was restored from
            self._name = self._latest(newest_with_copies(self._target))
            return
        self._name = name
        self._known = {piece.what: piece for piece in self._newest.pieces()}
        is_own = self._newest.before.startswith(owner)
        self._before = self._read(self._newest.before if is_own else "")

    def _latest(self, owner: str) -> str:
        with suppress(CopyDamaged, NotOurs):
            return manifests.read_latest(self._target, self._key, owner) if owner else ""
        return ""

    def _read(self, name: str) -> Manifest | None:
        """Return a manifest; None if there is none, or a damaged one: all is written again then."""
        with suppress(CopyDamaged, NotOurs):
            return read_manifest(self._target, self._key, name) if name else None
        return None

    def expect_newest(self) -> None:
        """Check that nobody has restored the run since. Raises Superseded, TargetFailed."""
        with self._beginning:
            if owner := self._owner or read_owner(self._state_dir):
                expect_newest(self._target, self._key, owner)

    def write(self) -> WrittenCopy:
        """Copy what has changed; the copy before stays whole whatever fails.

        Raises:
            Superseded: the run was restored elsewhere; nothing was written.
            NotOurs: the target holds others' copies; nothing was written.
            TargetFailed: the target cannot be written or read.
            StoreError, OSError, sqlite3.Error: the log here cannot be read.
        """
        self.expect_newest()
        if not self._owner:
            with self._beginning:
                self._begin()
        files, modules = self._pieces()
        serial = self._newest.serial + 1 if self._newest is not None else 1
        manifest = Manifest(
            run_id=self._run_id,
            run_name=self._run_name,
            serial=serial,
            at_s=self._clock(),
            before=self._name,
            files=files,
            modules=modules,
        )
        positions = tuple(module.position for module in modules)
        if self._newest is not None and _same(self._newest, manifest):
            return WrittenCopy(positions=positions, wire_bytes=0, is_new=False)
        self.expect_newest()  # uploads may have taken long
        name = self._new_name("manifest", serial)
        put_manifest(self._target, self._key, name, manifest)
        self.moved_s = time.monotonic()
        self._name, self._before, self._newest = name, self._newest, manifest
        self._known = {piece.what: piece for piece in manifest.pieces()}
        wire_bytes = sum(piece.bytes for piece in self._written)
        self._written = []
        return WrittenCopy(positions=positions, wire_bytes=wire_bytes)

    def prune(self) -> None:
        """Delete what neither the newest copy nor the one before names. Raises TargetFailed."""
        newest, before = self._newest, self._before
        if newest is None:
            return
        kept = {manifests.LATEST, "owner", _own(self._name), _own(newest.before)}
        kept |= {_own(piece.name) for each in (newest, before) if each for piece in each.pieces()}
        for name in self._target.names(self._owner):
            if name not in kept:
                self._target.delete(f"{self._owner}/{name}")
        if newest.before.startswith(self._owner):  # else the one before is another owner's
            for earlier in (name for name in owners(self._target) if name < self._owner):
                self._target.delete_folder(earlier)

    # Parts of a copy

    def _pieces(self) -> tuple[CopyObject, tuple[CopiedModule, ...]]:
        """Write all objects of a copy that are not there yet; no manifest names them so far."""
        try:
            modules = tuple(map(self._module, self._logs))
            return self._files(), modules
        except TargetFailed as error:
            if is_full(error):
                self._make_room()
            raise

    def _make_room(self) -> None:
        """Delete what failed copies have written: the next may need others, of the same length.

        After other failures it stays, so that a bad link need not carry it twice.
        """
        while self._written:
            piece = self._written.pop()
            self._known.pop(piece.what, None)
            with suppress(TargetFailed):
                self._target.delete(piece.name)

    def _module(self, log: CopiedLog) -> CopiedModule:
        store, name = log.store, log.files.module
        with _leased(store) as info:
            stop, chain = _reach(store, info) if log.is_logged else (info.position, info.chain)
            base_position, base_chain = store.base
            return CopiedModule(
                name=name,
                position=stop,
                chain=chain.hex(),
                base_position=base_position,
                base_chain=base_chain.hex(),
                started=(store.note("started") or b"").decode("ascii", "replace"),
                snapshot_position=info.position,
                snapshot=self._snapshot(store, name, info),
                bodies=tuple(self._bodies(store, name, info.position, stop)),
                rounds=tuple(self._rounds(log, base_position, stop)),
                epochs=self._epochs(store, name),
            )

    def _snapshot(self, store: LogStore, module: str, info: SnapshotInfo) -> CopyObject:
        def chunks() -> Iterator[bytes]:
            yield from snapshot_chunks(info, store.open_snapshot(info.position))

        what = f"snapshot {module} {info.position} {info.root.hex()}"
        return self._put("snapshot", module, info.position, what, chunks)

    def _bodies(self, store: LogStore, module: str, start: int, stop: int) -> Iterator[CopyObject]:
        for record in store.records(start, stop):
            if record.body_bytes:
                what = f"body {module} {record.position} {sha256(record.entry).hex()}"
                chunks = partial(store.body_chunks, record.position)
                yield self._put("body", module, record.position, what, chunks)

    def _rounds(self, log: CopiedLog, start: int, stop: int) -> Iterator[CopyObject]:
        """Copy the entries, in groups whose ends are the same in each copy."""
        store, module = log.store, log.files.module
        while start < stop:
            end = min(stop, (start // GROUP + 1) * GROUP)
            last = store.get(end - 1)
            chain = last.chain.hex() if last is not None else ""
            what = f"rounds {module} {start} {end} {chain}"
            yield self._put("rounds", module, start, what, partial(_group, log, start, end))
            start = end

    def _epochs(self, store: LogStore, module: str) -> CopyObject:
        raw = pack_epochs(store.epochs())
        what = f"epochs {module} {hashlib.sha256(raw).hexdigest()}"
        return self._put("epochs", module, 0, what, lambda: [raw])

    def _files(self) -> CopyObject:
        raw = packed(small_files(self._state_dir))
        what = f"files {hashlib.sha256(raw).hexdigest()}"
        if (known := self._known.get(what)) is not None:
            return known
        name = self._new_name("files", 0)
        return self._note(self._target.put(name, what, [self._key.seal(raw, name)]))

    def _put(
        self,
        kind: str,
        module: str,
        position: int,
        what: str,
        chunks: Callable[[], Iterable[bytes]],
    ) -> CopyObject:
        """Write an object under a new name, unless the newest copy has it."""
        if (known := self._known.get(what)) is not None:
            return known

        def watched() -> Iterator[bytes]:
            for chunk in chunks():
                yield chunk
                self.moved_s = time.monotonic()

        name = self._new_name(f"{kind}.{module}" if module else kind, position)
        return self._note(self._target.put(name, what, watched()))

    def _note(self, piece: CopyObject) -> CopyObject:
        # The next try needs not write it again if this copy fails later on.
        self._known[piece.what] = piece
        self._written.append(piece)
        self.moved_s = time.monotonic()
        return piece

    def _new_name(self, kind: str, number: int) -> str:
        return f"{self._owner}/{kind}-{number:012d}-{secrets.token_hex(4)}"


@contextmanager
def _leased(store: LogStore) -> Iterator[SnapshotInfo]:
    """Yield the newest snapshot, which stays, with the updates after it.

    Raises:
        NotStored: the disk has spoiled all of them; the first one is about to be made again.
    """
    while True:
        positions = store.snapshot_positions()
        if not positions:
            raise NotStored("the log has no snapshot to copy")
        position = positions[-1]
        with store.lease(position):
            try:
                info = store.snapshot(position)
            except NotStored:  # pruned in between
                continue
            yield info
            return


def small_files(state_dir: Path) -> dict[str, bytes]:
    """Return what a coordinator's directory holds beside its logs, by name."""
    found: dict[str, bytes] = {}
    for path in sorted(state_dir.iterdir()):
        if path.name.startswith(".") or path.name in LEFT_BEHIND or not path.is_file():
            continue
        if "history.db" in path.name or path.suffix in (".log", ".toml"):
            continue
        with suppress(FileNotFoundError):  # replaced meanwhile, by nothing
            if path.stat().st_size <= MAX_FILE_BYTES:
                found[path.name] = path.read_bytes()
    return found


def _reach(store: LogStore, info: SnapshotInfo) -> tuple[int, bytes]:
    """Return the position up to which the state can be computed from a snapshot, with its chain."""
    position, chain = info.position, info.chain
    for record in store.records(info.position, store.head.position):
        if not record.has_body:
            break
        position, chain = record.position + 1, record.chain
    return position, chain


def _group(log: CopiedLog, start: int, stop: int) -> list[bytes]:
    summaries = _summaries(log.files.file("history.db"), start, stop)
    rounds = [
        CopiedRound(
            record.epoch,
            record.position,
            record.entry,
            record.certificate,
            record.body_bytes,
            record.chain,
            summaries.get(record.position, b""),
        )
        for record in log.store.records(start, stop)
    ]
    return [pack_rounds(rounds)]


def _summaries(path: Path, start: int, stop: int) -> dict[int, bytes]:
    """Return what the history knows of rounds, by the positions of their entries."""
    with suppress(sqlite3.Error), closing(History(path, reads_only=True)) as history:
        found = {at: history.round(at + 1) for at in range(start, stop)}
        return {at: summary.to_json() for at, summary in found.items() if summary is not None}
    return {}


def _same(one: Manifest, other: Manifest) -> bool:
    alike = replace(other, serial=one.serial, at_s=one.at_s, before=one.before)
    return one == alike


def _own(name: str) -> str:
    """Return a name within its owner's folder."""
    return name.rpartition("/")[2]
