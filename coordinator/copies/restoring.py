"""A coordinator's directory from a copy: with it the run goes on, with the same invite.

It is made beside its place, checked, and renamed: a restore that fails leaves nothing behind. The
coordinator that starts on it holds what the copy held. What was decided since is with the peers; it
gets that as after any absence, for it must not decide it again:

- numbers of epochs that it may have signed since the copy are skipped, by a random amount, so that
  neither the coordinator that died nor another restore of the same copy signs the same number;
- it opens no epoch before peers that the log knows have said, for a minute, which epoch is their
  newest (`Epochs`), and then not before it has fetched what they hold;
- that all of them are gone is for the organiser to say (`--accept-loss`): nothing else proves it;
- the directory that wrote the copy is superseded before this one serves (`owners`).
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgpack

from atoll.coordinator.copies.archive import (
    CopiedRound,
    in_pieces,
    read_snapshot,
    unpack_epochs,
    unpack_rounds,
)
from atoll.coordinator.copies.manifest import CopiedModule, Manifest, read_latest, read_manifest
from atoll.coordinator.copies.owners import claim, keep_owner, newest_with_copies, number_of
from atoll.coordinator.copies.sealing import RECOVERY_FILE, RecoveryKey
from atoll.coordinator.copies.target import CopiesError, CopyDamaged, CopyObject, Target
from atoll.coordinator.copies.writing import MAX_FILE_BYTES
from atoll.coordinator.first_state import ROOT_FILE, ROOT_NOTE
from atoll.coordinator.history import History
from atoll.coordinator.relocating import keep_restore
from atoll.coordinator.run.keys import KEYS_FILE, RunKeys, write_private
from atoll.coordinator.run.spec import RunSpec, run_id
from atoll.coordinator.run.spec_problems import SpecError
from atoll.coordinator.run.status import RoundSummary, StatusError
from atoll.coordinator.service.server import MANY_EPOCHS, LogFiles
from atoll.coordinator.signing import NONE_SIGNED, SIGNED_FILE, read_signed, restored
from atoll.optim.log.entry import genesis_chain
from atoll.optim.log.module import log_id
from atoll.optim.log.store import LogStore
from atoll.optim.log.store_errors import StoreError
from atoll.optim.log.stored_snapshots import sync_folder
from atoll.optim.state import vectors
from atoll.optim.state.layout import Layout
from atoll.optim.state.mapped import MappedVectors, is_on_disk
from atoll.optim.state.outer_state import LEAF_BYTES, Assembly, StateError

MAX_FILES_BYTES = 64 * MAX_FILE_BYTES
RANGES = 1 << 20  # of `MANY_EPOCHS` numbers, of which a restore takes one: some remain in 63 bits


@dataclass(frozen=True, kw_only=True)
class FoundCopy:
    """A copy: its manifest, and the small files of the coordinator."""

    manifest: Manifest
    files: Mapping[str, bytes]
    spec: RunSpec
    """As the coordinator had it; where its copies went is not in there."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the rounds of each module that the copy holds."""
        return tuple(module.position for module in self.manifest.modules)


def find(target: Target, key: RecoveryKey, *, older: bool = False) -> FoundCopy:
    """Return the newest copy, or the one before it.

    Raises:
        CopiesError: there is none, it is of another key, or its manifest or files are damaged.
    """
    manifest = _manifest(target, key, older=older)
    piece = manifest.files
    _expect_length(target, piece, MAX_FILES_BYTES)
    files = msgpack.unpackb(key.unseal(b"".join(target.stream(piece)), piece.name))
    try:
        spec = RunSpec.from_json(files["spec.json"])
    except (KeyError, SpecError) as error:
        raise CopyDamaged(f"{target.url}: this version of Atoll cannot read it: {error}") from None
    return FoundCopy(manifest=manifest, files=files, spec=spec)


def _manifest(target: Target, key: RecoveryKey, *, older: bool) -> Manifest:
    owner = newest_with_copies(target)
    if not owner:
        raise CopiesError(
            f"{target.url}: expected copies of a run, got none; pass the target that is named as "
            "coordinator.copies in its RUN.toml"
        )
    manifest = read_manifest(target, key, read_latest(target, key, owner))
    if not older:
        return manifest
    if not manifest.before:
        raise CopiesError(f"{target.url}: expected two copies, got one; omit --older")
    return read_manifest(target, key, manifest.before)


def expect_new(state_dir: Path) -> None:
    """Check that a directory is not there, or empty. Raises CopiesError."""
    if state_dir.exists() and (not state_dir.is_dir() or any(state_dir.iterdir())):
        raise CopiesError(
            f"{state_dir}: expected a new or empty directory to restore into, got one that holds "
            "something; pass another with --state-dir DIR, or start without --restore to continue "
            "from what is there"
        )


def restore(target: Target, key: RecoveryKey, found: FoundCopy, state_dir: Path) -> str:
    """Make a directory from a copy, and supersede the one that wrote it; return its new owner.

    Args:
        target: holds the copy.
        key: with which it was sealed.
        found: the copy.
        state_dir: new, or empty.

    Raises:
        CopiesError: the copy is damaged; nothing stays behind.
        OSError: the disk takes no more; nothing stays behind.
    """
    with made_whole(state_dir) as partial:
        return _fill(target, key, found, partial)


@contextmanager
def made_whole(state_dir: Path) -> Iterator[Path]:
    """Yield a folder that becomes the directory when the block ends; nothing stays if it fails.

    Raises:
        CopiesError: the directory holds something already.
    """
    expect_new(state_dir)
    partial = state_dir.with_name(f".{state_dir.name}.restoring")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(mode=0o700, parents=True)
        yield partial
        if state_dir.exists():
            state_dir.rmdir()
        partial.rename(state_dir)
        sync_folder(state_dir.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(target: Target, key: RecoveryKey, found: FoundCopy, folder: Path) -> str:
    manifest = found.manifest
    _restore_files(target, found, folder)
    identifier = _expect_run(target, found, folder)
    for module in manifest.modules:
        files = LogFiles(folder, identifier, module.name)
        _restore_log(target, found.spec, files, module)
        _skip_numbers(target, files, module)
    key.write(folder / RECOVERY_FILE)
    owner = claim(target, key, run_id=manifest.run_id, run_name=found.spec.run.name)
    keep_owner(folder, owner)
    keep_restore(folder, number_of(owner))
    return owner


def _restore_files(target: Target, found: FoundCopy, folder: Path) -> None:
    for name, data in found.files.items():
        if name != Path(name).name or name.startswith("."):
            raise CopyDamaged(f"{target.url}: expected the name of a file, got {name[:80]!r}")
        write_private(folder / name, data)


def _expect_run(target: Target, found: FoundCopy, folder: Path) -> bytes:
    """Check that the files are those of the run that the manifest names; return the run's id."""
    manifest, keys = found.manifest, folder / KEYS_FILE
    if not keys.exists():
        raise CopyDamaged(f"{target.url}/{manifest.files.name}: it lacks {KEYS_FILE}")
    identifier = run_id(found.spec, RunKeys.load_or_create(keys).run_public_key)
    modules = tuple(module.name for module in manifest.modules)
    if identifier != manifest.run_id or modules != found.spec.modules:
        raise CopyDamaged(
            f"{target.url}/{manifest.files.name}: expected run {manifest.run_id[:12]}, got "
            f"{identifier[:12]}"
        )
    return bytes.fromhex(identifier)


def _restore_log(target: Target, spec: RunSpec, files: LogFiles, module: CopiedModule) -> None:
    root = bytes.fromhex(files.file(ROOT_FILE).read_text(encoding="ascii"))
    identifier = log_id(files.run_id, module.name)
    try:
        with closing(
            LogStore(
                files.folder,
                run_id=identifier,
                genesis_chain=genesis_chain(identifier, root),
                fsync=True,
            )
        ) as store:
            if module.base_position:
                chain = bytes.fromhex(module.base_chain)
                store.begin_at(position=module.base_position, chain=chain)
            for epoch, record in unpack_epochs(_small(target, module.epochs), module.epochs.name):
                store.put_epoch(epoch, record)
            _restore_entries(target, store, files, module)
            try:
                _restore_snapshot(target, spec, store, files, module)
            except StateError as error:
                raise CopyDamaged(f"{target.url}/{module.snapshot.name}: {error}") from None
            if module.started:
                store.put_note("started", module.started.encode())
            if module.snapshot_position:
                store.put_note(ROOT_NOTE, root)
            is_logged = spec.method().reduction != "pairs"
            if is_logged and (store.head.position, store.head.chain.hex()) != (
                module.position,
                module.chain,
            ):
                raise CopyDamaged(f"{target.url}: the entries do not end where the copy says")
    except StoreError as error:
        raise CopyDamaged(f"{target.url}: {error}; restore an older copy with --older") from None


def _restore_entries(
    target: Target, store: LogStore, files: LogFiles, module: CopiedModule
) -> None:
    bodies = iter(module.bodies)
    with closing(History(files.file("history.db"))) as history:
        for piece in module.rounds:
            for each in unpack_rounds(_small(target, piece), piece.name):
                _restore_entry(target, store, module, each, bodies)
                _restore_summary(history, each.summary)
    if next(bodies, None) is not None:
        raise CopyDamaged(f"{target.url}: there are more updates than entries")


def _restore_entry(
    target: Target,
    store: LogStore,
    module: CopiedModule,
    each: CopiedRound,
    bodies: Iterator[CopyObject],
) -> None:
    if each.position < module.snapshot_position or not each.body_bytes:
        store.append_header(
            epoch=each.epoch,
            position=each.position,
            entry=each.entry,
            certificate=each.certificate,
            body_bytes=each.body_bytes,
            chain=each.chain,
        )
        return
    piece = next(bodies, None)
    if piece is None or piece.bytes != each.body_bytes:
        raise CopyDamaged(f"{target.url}: the update of round {each.position + 1} is missing")
    store.append(
        epoch=each.epoch,
        position=each.position,
        entry=each.entry,
        certificate=each.certificate,
        body=b"".join(target.stream(piece)),
        chain=each.chain,
        before_base=True,  # all epochs are here already
    )


def _restore_summary(history: History, raw: bytes) -> None:
    try:
        summary = RoundSummary.from_json(raw) if raw else None
    except StatusError:  # of another version: only people read it
        return
    if summary is not None:
        history.put_round(summary)


def _restore_snapshot(
    target: Target, spec: RunSpec, store: LogStore, files: LogFiles, module: CopiedModule
) -> None:
    piece, method = module.snapshot, spec.method()
    header, begin, chunks = read_snapshot(target.stream(piece), piece.name)
    if header.position != module.snapshot_position:
        raise CopyDamaged(f"{target.url}/{piece.name}: it is of another round")
    layout = Layout.from_json(header.layout)
    beside = max(0, piece.bytes - begin - 4 * layout.numel)
    assembly = Assembly(
        layout=layout,
        position=header.position,
        leaf_digests=header.digests,
        root=header.root,
        memory_numel=beside // method.memory_dtype.itemsize,
        memory_dtype=method.memory_dtype,
        # The state passes through files, so that a restore takes no more memory than a coordinator.
        allocate=MappedVectors(files.folder).empty if is_on_disk(files.folder) else vectors.empty,
    )
    for index, leaf in enumerate(in_pieces(chunks, LEAF_BYTES)):
        assembly.add(index, leaf)
    store.save_snapshot(assembly.finish(), header.chain)


def _skip_numbers(target: Target, files: LogFiles, module: CopiedModule) -> None:
    """Let no epoch be signed whose number can have been signed since the copy was made."""
    epochs = unpack_epochs(_small(target, module.epochs), module.epochs.name)
    skip_numbers(files.file(SIGNED_FILE), [epoch for epoch, _ in epochs])


def skip_numbers(path: Path, epochs: Sequence[int]) -> None:
    """Let only epochs be signed whose numbers are far above these and the one in `epoch.signed`."""
    signed, _ = read_signed(path)
    highest = max([NONE_SIGNED if signed is None else signed, *epochs])
    restored(path, highest + MANY_EPOCHS * (1 + secrets.randbelow(RANGES)))


def _small(target: Target, piece: CopyObject) -> bytes:
    _expect_length(target, piece, MAX_FILES_BYTES)
    return b"".join(target.stream(piece))


def _expect_length(target: Target, piece: CopyObject, max_bytes: int) -> None:
    if piece.bytes > max_bytes:
        raise CopyDamaged(f"{target.url}/{piece.name}: expected at most {max_bytes} bytes")
