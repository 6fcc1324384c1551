import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from atoll.optim.log.store import LogStore
from atoll.optim.log.store_errors import Conflict, NotStored, OutOfOrder, StoreCorrupt, WrongRun
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState

RUN = b"r" * 32
GENESIS = b"g" * 32
LAYOUT = Layout(names=("w",), shapes=((300_000,),))  # a snapshot of three leaves


def open_store(path: Path, **options: int | bool | None) -> LogStore:
    return LogStore(path, run_id=RUN, genesis_chain=GENESIS, **options)  # type: ignore[arg-type]


def chain_of(position: int) -> bytes:
    return hashlib.sha256(b"%d" % position).digest()


def append(store: LogStore, position: int, body: bytes = b"body", epoch: int = 0) -> bool:
    return store.append(
        epoch=epoch,
        position=position,
        entry=b"entry %d %d" % (epoch, position),
        certificate=b"votes",
        body=body,
        chain=chain_of(position + 1),
    )


def state_at(position: int) -> OuterState:
    torch.set_num_threads(1)
    state = OuterState.blank(LAYOUT, position)
    state.params_N.copy_(torch.arange(LAYOUT.numel) + float(position))
    return state


def test_entries_come_back_after_reopening(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert (store.head.epoch, store.head.position, store.head.chain) == (0, 0, GENESIS)
    body = os.urandom(2_500_000)
    assert append(store, 0, body) and append(store, 1, b"")
    store.close()
    store = open_store(tmp_path)
    assert (store.head.position, store.head.chain) == (2, chain_of(2))
    assert store.body(0) == body and store.body(1) == b""
    assert [len(chunk) for chunk in store.body_chunks(0)] == [1 << 20, 1 << 20, 402_848]
    assert [r.position for r in store.headers(0, 10)] == [0, 1]
    assert store.get(2) is None
    store.close()


def test_an_entry_that_does_not_come_next(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(OutOfOrder, match="expected the entry at position 0, got 3"):
        append(store, 3)
    store.put_epoch(2, b"signed")
    with pytest.raises(OutOfOrder, match="epoch 2 or later, got 1"):
        append(store, 0, epoch=1)
    store.close()


def test_the_same_entry_twice_is_nothing_new_but_another_is_a_conflict(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store, 0)
    assert append(store, 0) is False
    with pytest.raises(Conflict, match="position 0 is decided"):
        append(store, 0, epoch=1)
    store.close()


def test_the_log_of_another_run_is_left_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store, 0)
    store.close()
    with pytest.raises(WrongRun, match="use another directory"):
        LogStore(tmp_path, run_id=b"x" * 32, genesis_chain=GENESIS)
    store = open_store(tmp_path)
    assert store.head.position == 1
    store.close()


@pytest.mark.parametrize("content", [b"no database" * 500, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_file_of_noise_is_corrupt_and_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log.sqlite").write_bytes(content)
    with pytest.raises(StoreCorrupt, match=r"move the directory .* away, and nothing else"):
        open_store(tmp_path)
    assert (tmp_path / "log.sqlite").read_bytes() == content


WITHOUT_ROOM = """
import resource, sqlite3, sys
from contextlib import closing
from pathlib import Path
from atoll.optim.log.store import LogStore

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    LogStore(Path(sys.argv[1]), run_id=b"r" * 32, genesis_chain=b"g" * 32)
except sqlite3.OperationalError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a file's size, as Linux tells them")
def test_a_disk_without_room_is_no_damage(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "disk" in told.stdout


def test_a_database_of_something_else(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "log.sqlite")
    db.execute("CREATE TABLE holidays (day TEXT)")
    db.close()
    with pytest.raises(StoreCorrupt, match="another database"):
        open_store(tmp_path)


def test_a_log_of_an_earlier_version_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Its snapshots have digests of another hash, and so its chain has another beginning."""
    open_store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "log.sqlite")) as db:
        db.execute("PRAGMA user_version = 1")
    with pytest.raises(StoreCorrupt, match=r"version 2, got 1; use the version of Atoll that"):
        open_store(tmp_path)


def test_bodies_are_bounded_and_headers_stay(tmp_path: Path) -> None:
    store = open_store(tmp_path, body_budget_bytes=3000)
    for position in range(10):
        if position in (7, 8):
            store.save_snapshot(state_at(position), chain_of(position))
        append(store, position, bytes(1000))
    assert store.first_with_bodies() == 7
    assert len(store.headers(0, 100)) == 10
    with pytest.raises(NotStored, match="ask another peer"):
        store.body(6)
    assert store.statistics().body_bytes == 3000 and store.statistics().pruned_bodies == 7
    store.add_body(6, bytes(1000))
    assert store.body(6) == bytes(1000) and store.first_with_bodies() == 6
    with pytest.raises(NotStored):
        store.add_body(5, b"of another length")
    store.close()


def test_a_lease_keeps_bodies_over_the_budget(tmp_path: Path) -> None:
    store = open_store(tmp_path, body_budget_bytes=2000)
    with store.lease(2):
        for position in range(8):
            append(store, position, bytes(1000))
        store.save_snapshot(state_at(6), chain_of(6))
        store.save_snapshot(state_at(8), chain_of(8))
        assert store.first_with_bodies() == 2
    store.prune()
    assert store.first_with_bodies() == 6
    store.close()


def test_bodies_after_the_older_of_two_snapshots_stay(tmp_path: Path) -> None:
    store = open_store(tmp_path, body_budget_bytes=0)
    for position in range(8):
        append(store, position, bytes(1000))
        if position % 2:
            store.save_snapshot(state_at(position + 1), chain_of(position + 1))
    assert store.first_with_bodies() == 6
    store.close()


def test_snapshots_are_verified_when_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    info = store.save_snapshot(state_at(4), chain_of(4))
    assert (info.chain, len(info.leaf_digests)) == (chain_of(4), 3)
    store.close()
    store = open_store(tmp_path)
    loaded = store.load_snapshot(4)
    assert loaded.root() == info.root and loaded.position == 4
    with info.path.open("r+b") as file:
        file.seek(1_500_000)
        file.write(b"!")
    with pytest.raises(StoreCorrupt, match="leaf 1"):
        store.load_snapshot(4)
    info.path.unlink()
    with pytest.raises(StoreCorrupt, match="fetch the snapshot again"):
        store.load_snapshot(4)
    with pytest.raises(NotStored, match="snapshot 5 is not here"):
        store.load_snapshot(5)
    store.close()


def test_two_snapshots_the_leased_one_and_the_genesis_stay(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save_snapshot(state_at(0), GENESIS)
    with store.lease(4):
        for position in range(4, 24, 4):
            store.save_snapshot(state_at(position), chain_of(position))
        assert store.snapshot_positions() == [0, 4, 16, 20]
    store.prune()
    assert store.snapshot_positions() == [0, 16, 20]
    files = sorted(path.name for path in tmp_path.glob("snapshot-*"))
    assert files == [f"snapshot-{p:012d}.bin" for p in (0, 16, 20)]
    store.close()


def test_half_written_snapshots_go_when_the_store_opens(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (tmp_path / "snapshot-000000000008.bin.new").write_bytes(b"half")
    (tmp_path / "snapshot-000000000008.bin").write_bytes(b"never entered in the database")
    open_store(tmp_path).close()
    assert not list(tmp_path.glob("snapshot-*"))


def test_a_snapshots_name_is_on_the_disk_before_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power could leave a row whose file is gone, as the hunt found."""
    synced: list[tuple[int, bool]] = []
    name = tmp_path / "snapshot-000000000004.bin"
    store = open_store(tmp_path)
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, name.exists()))
    )
    store.save_snapshot(state_at(4), chain_of(4))
    assert synced == [(name.stat().st_ino, False), (tmp_path.stat().st_ino, True)]
    store.close()


def test_gaps_are_the_runs_without_bodies(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.gaps() == []
    for position in range(8):
        if position in (1, 2, 5):
            store.append_header(
                epoch=0,
                position=position,
                entry=b"entry 0 %d" % position,
                certificate=b"votes",
                body_bytes=4,
                chain=chain_of(position + 1),
            )
        else:
            append(store, position)
    assert store.gaps() == [(1, 3), (5, 6)] and store.first_with_bodies() == 6
    store.add_body(5, b"body")
    assert store.gaps() == [(1, 3)] and store.first_with_bodies() == 3
    store.close()


def test_rewinding_to_the_base_of_a_new_epoch(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for position in range(6):
        append(store, position)
    store.save_snapshot(state_at(4), chain_of(4))
    store.save_snapshot(state_at(6), chain_of(6))
    assert store.rewind(4) == 2
    assert store.snapshot_positions() == [4]
    assert (store.head.position, store.head.chain) == (4, chain_of(4))
    store.put_epoch(1, b"signed epoch")
    append(store, 4, epoch=1)
    assert store.head.epoch == 1 and store.latest_epoch() == b"signed epoch"
    store.close()


def test_a_joiner_begins_after_its_snapshot(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store, 0)
    store.begin_at(position=40, chain=chain_of(40))
    store.close()
    store = open_store(tmp_path)
    assert (store.head.position, store.head.chain) == (40, chain_of(40))
    assert store.first_with_bodies() == 40
    append(store, 40)
    with pytest.raises(OutOfOrder, match="recover a snapshot"):
        store.rewind(39)
    store.close()


def test_headers_without_bodies(tmp_path: Path) -> None:
    store = open_store(tmp_path, body_budget_bytes=0)
    values = {"epoch": 0, "entry": b"e", "certificate": b"c", "chain": chain_of(1)}
    store.append_header(position=0, body_bytes=4, **values)  # type: ignore[arg-type]
    store.append_header(position=1, body_bytes=0, **values)  # type: ignore[arg-type]
    assert store.first_with_bodies() == 1 and store.body(1) == b""
    with pytest.raises(NotStored):
        store.body(0)
    with pytest.raises(OutOfOrder):
        store.append_header(position=5, body_bytes=4, **values)  # type: ignore[arg-type]
    store.close()


def test_notes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.note("x") is None
    store.put_note("x", b"1")
    assert store.note("x") == b"1"
    store.close()


def test_many_threads(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            while store.head.position < 50:
                for record in store.headers(0, 100):
                    assert store.body(record.position) == b"body"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for position in range(50):
        append(store, position)
    for thread in threads:
        thread.join(20)
    assert not errors
    store.close()


CHILD = """
import sys
from contextlib import closing
from pathlib import Path
from atoll.optim.log.store import LogStore
store = LogStore(Path(sys.argv[1]), run_id=b"r" * 32, genesis_chain=b"g" * 32)
position = store.head.position
while True:
    store.append(epoch=0, position=position, entry=b"entry %d" % position, certificate=b"",
                 body=bytes([position % 256]) * 3_000_000, chain=b"c" * 32)
    print(position, flush=True)
    position += 1
"""


def test_kill_9_leaves_exactly_what_was_appended(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, tmp_path], stdout=subprocess.PIPE)
    assert child.stdout is not None
    acknowledged = [int(child.stdout.readline()) for _ in range(5)]
    child.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in child.stdout.read().split()]
    child.wait(20)
    child.stdout.close()
    store = open_store(tmp_path)
    held = store.headers(0, 1000)
    assert len(held) - len(acknowledged) in (0, 1)
    for record in held:
        assert record.entry == b"entry %d" % record.position
        assert store.body(record.position) == bytes([record.position % 256]) * 3_000_000
    store.close()


def test_a_pruned_snapshot_is_readable_for_whoever_holds_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save_snapshot(state_at(4), chain_of(4))
    held = store.open_snapshot(4)
    for position in (8, 12):
        store.save_snapshot(state_at(position), chain_of(position))
    assert store.snapshot_positions() == [8, 12]
    state = state_at(4)
    assert [held.read_leaf(i) for i in range(3)] == [state.read_leaf(i) for i in range(3)]
    assert (held.position, held.root(), held.leaves()) == (4, state.root(), state.leaves())
    with pytest.raises(IndexError):
        held.read_leaf(3)
    with pytest.raises(NotStored):
        store.open_snapshot(4)
    store.close()


def test_a_damaged_leaf_is_given_to_nobody(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    info = store.save_snapshot(state_at(4), chain_of(4))
    held = store.open_snapshot(4)
    with info.path.open("r+b") as file:
        file.seek(1_500_000)
        file.write(b"!")
    assert held.read_leaf(0) == state_at(4).read_leaf(0)
    with pytest.raises(StoreCorrupt, match="leaf 1 is damaged"):
        held.read_leaf(1)
    info.path.unlink()
    with pytest.raises(StoreCorrupt, match="fetch the snapshot again"):
        store.open_snapshot(4)
    store.close()


def test_a_snapshot_that_is_void_when_it_is_written_is_dropped(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for position in range(4):
        append(store, position)
    void = store.write_snapshot(state_at(4), chain_of(4))
    kept = store.write_snapshot(state_at(3), chain_of(3))
    assert store.snapshot_positions() == []
    store.rewind(3)
    assert store.put_snapshot(kept) and not store.put_snapshot(void)
    assert store.snapshot_positions() == [3]
    assert [path.name for path in tmp_path.glob("snapshot-*")] == ["snapshot-000000000003.bin"]
    store.close()
