"""What a simulated disk keeps after a kill, and after a loss of power."""

import os
import random
import sqlite3
from pathlib import Path

import pytest

from atoll.peer.lab.hunt import disks
from atoll.peer.lab.hunt.disks import Disk


def disk_in(folder: Path, seed: int = 0) -> Disk:
    folder.mkdir()
    return Disk(folder, random.Random(seed), lambda: 0.0)


def database(disk: Disk, synchronous: str) -> sqlite3.Connection:
    db = disk.connect(sqlite3.connect, disk.folder / "log.sqlite")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {synchronous}")
    db.execute("CREATE TABLE t (x)")
    return db


def rows_after(disk: Disk, target: Path, *, lost_power: bool) -> int:
    disks.write(target, disk.image(lost_power=lost_power))
    db = sqlite3.connect(target / "log.sqlite")
    try:
        return int(db.execute("SELECT count(*) FROM t").fetchone()[0])
    finally:
        db.close()


def add(db: sqlite3.Connection, count: int) -> None:
    for number in range(count):
        with db:
            db.execute("INSERT INTO t VALUES (?)", (number,))


def test_a_kill_keeps_every_commit(tmp_path: Path) -> None:
    disk = disk_in(tmp_path / "a")
    add(database(disk, "NORMAL"), 20)
    assert rows_after(disk, tmp_path / "b", lost_power=False) == 20
    disk.close()


def test_a_loss_of_power_keeps_what_was_synced(tmp_path: Path) -> None:
    disk = disk_in(tmp_path / "a")
    add(database(disk, "FULL"), 20)
    assert rows_after(disk, tmp_path / "b", lost_power=True) == 20
    disk.close()


def test_a_loss_of_power_takes_the_last_commits_otherwise(tmp_path: Path) -> None:
    kept = set()
    for seed in range(12):
        disk = disk_in(tmp_path / f"a{seed}", seed)
        disk.connect(sqlite3.connect, disk.folder / "other.sqlite").close()
        db = database(disk, "NORMAL")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        add(db, 20)
        kept.add(rows_after(disk, tmp_path / f"b{seed}", lost_power=True))
        disk.close()
    assert min(kept) < 20 and len(kept) > 3


def test_a_full_disk_takes_no_rows(tmp_path: Path) -> None:
    disk = disk_in(tmp_path / "a")
    db = database(disk, "FULL")
    disk.is_full = True
    with pytest.raises(sqlite3.OperationalError, match="full"):
        add(db, 1)
    disk.close()


def test_an_unsynced_file_may_be_torn_and_a_synced_one_not(tmp_path: Path) -> None:
    disk = disk_in(tmp_path / "a")
    (disk.folder / "loose").write_bytes(b"x" * 100)
    with (disk.folder / "safe").open("wb") as file:
        file.write(b"x" * 100)
        file.flush()
        disk.fsync(file.fileno())
    left = [disk.image(lost_power=True) for _ in range(20)]
    assert {len(files["safe"]) for files in left} == {100}
    assert 0 in {len(files["loose"]) for files in left}


def test_a_rename_lasts_once_its_folder_is_synced(tmp_path: Path) -> None:
    disk = disk_in(tmp_path / "a")
    target = disk.folder / "name"
    target.write_bytes(b"old")
    disk.write_back()
    (disk.folder / "new").write_bytes(b"new")
    disk.write_back()
    disk.before_replace(target)
    os.replace(disk.folder / "new", target)
    disk.replaced(target)
    assert {disk.image(lost_power=True)["name"] for _ in range(20)} == {b"old", b"new"}
    folder = os.open(disk.folder, os.O_RDONLY)
    disk.fsync(folder)
    os.close(folder)
    assert {disk.image(lost_power=True)["name"] for _ in range(20)} == {b"new"}
