"""Copies: what is written, in which order, and what remains of a copy that fails."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.copies.keeping import Copies
from atoll.coordinator.copies.manifest import read_latest, read_manifest
from atoll.coordinator.copies.owners import read_owner
from atoll.coordinator.copies.restoring import find, restore
from atoll.coordinator.copies.target import (
    CopyDamaged,
    CopyObject,
    Target,
    TargetFailed,
    reason,
)
from atoll.coordinator.copies.writing import CopyWriter
from atoll.optim.log.store_errors import NotStored
from support.copies import ROUNDS, Run, opened, past, run_template, writer_of

__all__ = ["past", "run_template"]


def truncated(run: Run, writer: CopyWriter, store: Any, position: int) -> None:
    """Copy the run as it was at a position, then give the log its end back."""
    records = store.headers(position, ROUNDS)
    bodies = [store.body(record.position) for record in records]
    store.rewind(position)
    writer.write()
    for record, body in zip(records, bodies, strict=True):
        store.append(
            epoch=record.epoch,
            position=record.position,
            entry=record.entry,
            certificate=record.certificate,
            body=body,
            chain=record.chain,
        )


def test_a_copy_holds_the_newest_snapshot_and_what_came_after(past: Run) -> None:
    with opened(past.state_dir) as log:
        writer = writer_of(past.target, past.state_dir, log)
        copied = writer.write()
        assert copied.positions == (ROUNDS,)
        manifest = find(past.target, past.key).manifest
        (module,) = manifest.modules
        assert (module.snapshot_position, len(module.bodies), len(module.rounds)) == (4, 1, 1)
        assert module.chain == log.store.head.chain.hex()
        assert not writer.write().is_new
        assert writer.write().wire_bytes == 0


def test_no_secret_is_readable_in_a_copy(past: Run) -> None:
    with opened(past.state_dir) as log:
        writer_of(past.target, past.state_dir, log).write()
    whole = b"".join(path.read_bytes() for path in past.folder.rglob("*") if path.is_file())
    keys = (past.state_dir / "keys.json").read_bytes()
    for secret in (b"run_key", b"token", keys[40:80], past.invite.encode()[20:60]):
        assert secret in keys + past.invite.encode()
        assert secret not in whole


class Cut(Target):
    """A target whose `num`th write fails: before it, halfway, or once it is there."""

    def __init__(self, url: str, num: int, how: str) -> None:
        super().__init__(url)
        self.left, self.how = num, how

    def _write(self, name: str, chunks: Iterable[bytes]) -> None:
        self.left -= 1
        if self.left:
            super()._write(name, chunks)
            return
        if self.how != "before":
            data = b"".join(chunks)
            super()._write(name, [data[: len(data) // 2] if self.how == "half" else data])
        raise TargetFailed("cut")


@pytest.mark.parametrize("how", ["before", "half", "after"])
def test_a_crash_at_any_write_leaves_the_older_copy_whole(past: Run, how: str) -> None:
    """Objects, the manifest and `latest`: each write fails once, and the copy before restores."""
    owner, seen = "", set()
    for num in itertools.count(1):
        with opened(past.state_dir) as log:
            writer = writer_of(past.target, past.state_dir, log)
            truncated(past, writer, log.store, 4)
            owner = read_owner(past.state_dir)
            cut = Cut(past.folder.as_uri(), num, how)
            writer._target = cut
            try:
                writer.write()
            except TargetFailed:
                pass
            else:
                assert cut.left > 0
                break
        latest = find(past.target, past.key).positions
        seen.add(latest)
        place = past.state_dir.with_name(f"restored-{num}")
        restore(past.target, past.key, find(past.target, past.key), place)
        with opened(place) as log:
            assert (log.store.head.position,) == latest
    # A body, entries, the manifest and `latest`; once renamed, `latest` is past the last fault.
    assert num == 5 and owner
    assert seen == {(4,)}


class Full(Target):
    """A folder on a disk that is full from its `num`th write on: the kernel says so."""

    def __init__(self, url: str, num: int) -> None:
        super().__init__(url)
        self.left = num

    def _write(self, name: str, chunks: Iterable[bytes]) -> None:
        self.left -= 1
        if self.left <= 0:
            path = Path(self._path(name))
            path.unlink(missing_ok=True)
            path.symlink_to("/dev/full")
        super()._write(name, chunks)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_a_full_disk_keeps_the_older_copy_and_no_parts_of_newer(past: Run, num: int) -> None:
    """Each failed try left up to a whole state behind, so that the disk was never free again."""
    told: list[tuple[str, str]] = []
    with opened(past.state_dir) as log:
        writer = writer_of(past.target, past.state_dir, log)
        truncated(past, writer, log.store, 4)
        owned = past.folder / read_owner(past.state_dir)
        before = names(owned)
        copies = Copies(writer, lambda level, text: told.append((level, text)))
        writer._target = Full(past.folder.as_uri(), num)
        asyncio.run(copies.copy())
        asyncio.run(copies.copy())
        left = names(owned) - before
        if num < 3:  # a body, entries; then the manifest and `latest`, which need them
            assert not left
        else:
            assert {name.partition("-")[0] for name in left} <= {
                "body",
                "rounds",
                "manifest",
                "latest.new",
            }
        assert copies.status.failing == "it is full" and len(told) == 1
        assert told[0][0] == "warning" and "it is full" in told[0][1]
        assert find(past.target, past.key).positions == (4,)
        aside = Target(
            str(shutil.copytree(past.folder, past.folder.with_name("aside"), symlinks=True))
        )
        restore(aside, past.key, find(aside, past.key), past.state_dir.with_name("older"))
        (owned / "latest.new").unlink(missing_ok=True)
        writer._target = past.target
        asyncio.run(copies.copy())
        assert told[-1] == ("info", f"copies work again: the newest is after round {ROUNDS}")
        assert find(past.target, past.key).positions == (ROUNDS,)


def test_a_link_that_fails_need_not_carry_an_object_twice(past: Run) -> None:
    with opened(past.state_dir) as log:
        writer = writer_of(past.target, past.state_dir, log)
        writer._target = Cut(past.folder.as_uri(), 2, "before")
        with pytest.raises(TargetFailed):
            writer.write()
        owned = past.folder / read_owner(past.state_dir)
        (snapshot,) = (name for name in names(owned) if name.startswith("snapshot"))
        writer._target = past.target
        writer.write()
        assert find(past.target, past.key).manifest.modules[0].snapshot.name.endswith(snapshot)


def test_without_a_snapshot_a_copy_fails_until_there_is_one(past: Run) -> None:
    """A disk may have spoiled the only one; it is made again soon."""
    with opened(past.state_dir) as log:
        writer = writer_of(past.target, past.state_dir, log)
        positions = log.store.snapshot_positions
        log.store.snapshot_positions = list  # type: ignore[method-assign]
        with pytest.raises(NotStored) as failure:
            writer.write()
        assert reason(failure.value) == "a part of the log to copy is damaged or gone"
        log.store.snapshot_positions = positions  # type: ignore[method-assign]
        assert writer.write().is_new


def test_what_a_copy_has_is_not_sent_again(past: Run) -> None:
    with opened(past.state_dir) as log:
        writer = writer_of(past.target, past.state_dir, log)
        truncated(past, writer, log.store, 4)
        before = {piece.what: piece for piece in find(past.target, past.key).manifest.pieces()}
        writer.write()
        after = {piece.what: piece for piece in find(past.target, past.key).manifest.pieces()}
        kinds = {what.split()[0] for what in after.keys() - before.keys()}
        assert kinds == {"body", "rounds"}
        assert all(before[what] == after[what] for what in before.keys() & after.keys())


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_old_objects_go_but_never_those_of_the_two_newest_copies(past: Run) -> None:
    with opened(past.state_dir) as log:
        writer = writer_of(past.target, past.state_dir, log)
        owned = past.folder / read_owner(past.state_dir)
        truncated(past, writer, log.store, 2)
        first = names(owned)
        (owned / "body-000000000003-deadbeef").write_bytes(b"of a copy that failed")
        writer.prune()
        assert names(owned) == first
        truncated(past, writer, log.store, 4)
        writer.prune()
        assert first < names(owned)
        writer.write()
        writer.prune()
        newest = find(past.target, past.key).manifest
        before = find(past.target, past.key, older=True).manifest
        kept = {Path(p.name).name for each in (newest, before) for p in each.pieces()}
        manifests = {name for name in names(owned) if name.startswith("manifest")}
        assert names(owned) == kept | manifests | {"latest", "owner"}
        assert len(manifests) == 2
        assert newest.modules[0].position == ROUNDS and before.modules[0].position == 4


def test_a_coordinator_that_starts_again_continues_its_copies(past: Run) -> None:
    with opened(past.state_dir) as log:
        writer = writer_of(past.target, past.state_dir, log)
        writer.write()
        again = CopyWriter(
            past.target,
            past.key,
            run_id=log.files.run_id.hex(),
            run_name="test",
            state_dir=past.state_dir,
            logs=[log],
        )
        assert not again.write().is_new
        (past.state_dir / "orders.json").write_text("[]")
        assert again.write().wire_bytes < 100_000
        assert find(past.target, past.key).manifest.serial == 2


def test_a_copy_ends_before_an_update_that_is_missing(past: Run) -> None:
    """Else nobody could compute the state at its end, if all peers are gone."""
    with opened(past.state_dir) as log:
        log.store.drop_snapshots([4])
        log.store.drop_bodies([3])
        writer_of(past.target, past.state_dir, log).write()
    (module,) = find(past.target, past.key).manifest.modules
    assert (module.snapshot_position, module.position) == (2, 3)


@pytest.mark.parametrize("spoil", ["flip", "cut", "lengthen", "remove"])
def test_a_damaged_object_is_refused_by_its_name(past: Run, spoil: str) -> None:
    with opened(past.state_dir) as log:
        writer_of(past.target, past.state_dir, log).write()
    found = find(past.target, past.key)
    (module,) = found.manifest.modules
    pieces = (module.snapshot, module.bodies[0], module.rounds[0], module.epochs)
    for num, piece in enumerate(pieces):
        path = past.folder / piece.name
        whole = path.read_bytes()
        damage(path, whole, spoil)
        place = past.state_dir.with_name(f"restored-{num}")
        with pytest.raises(CopyDamaged, match=path.name):
            restore(past.target, past.key, found, place)
        assert not list(place.parent.glob("*restor*"))
        path.write_bytes(whole)
    for piece in (found.manifest.files, manifest_piece(past)):
        path = past.folder / piece.name
        whole = path.read_bytes()
        damage(path, whole, spoil)
        with pytest.raises(ValueError, match=path.name):
            find(past.target, past.key)
        path.write_bytes(whole)
    assert os.listdir(past.folder) == [read_owner(past.state_dir)]


def damage(path: Path, whole: bytes, how: str) -> None:
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    match how:
        case "flip":
            path.write_bytes(flipped)
        case "cut":
            path.write_bytes(whole[:middle])
        case "lengthen":
            path.write_bytes(whole + b"\0")
        case "remove":
            path.unlink()


def manifest_piece(run: Run) -> CopyObject:
    name = read_latest(run.target, run.key, read_owner(run.state_dir))
    assert read_manifest(run.target, run.key, name)
    return CopyObject(what="", name=name, bytes=0, sha256="")


def test_the_copy_before_is_there_if_the_newest_is_damaged(past: Run) -> None:
    with opened(past.state_dir) as log:
        writer = writer_of(past.target, past.state_dir, log)
        truncated(past, writer, log.store, 4)
        writer.write()
        writer.prune()
    (past.folder / find(past.target, past.key).manifest.modules[0].bodies[0].name).unlink()
    place = past.state_dir.with_name("restored")
    restore(past.target, past.key, find(past.target, past.key, older=True), place)
    with opened(place) as log:
        assert log.store.head.position == 4
