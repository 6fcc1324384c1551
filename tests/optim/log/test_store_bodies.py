"""Bodies that are written after their entries."""

import os
import sqlite3
from pathlib import Path

import pytest

from atoll.optim.log import store as module
from atoll.optim.log.store import CHUNK_BYTES, LogStore
from atoll.optim.log.store_errors import NotStored

GENESIS = b"g" * 32
BODY = b"b" + os.urandom(2 * CHUNK_BYTES + 4)


def opened(folder: Path) -> LogStore:
    return LogStore(folder, run_id=b"r" * 32, genesis_chain=GENESIS)


def append(
    store: LogStore, position: int, body: bytes = BODY, *, writes_body: bool = False
) -> bool:
    return store.append(
        epoch=0,
        position=position,
        entry=b"entry %d" % position,
        certificate=b"votes",
        body=body,
        chain=b"%032d" % position,
        writes_body=writes_body,
    )


def test_a_body_is_read_from_memory_until_it_is_written(tmp_path: Path) -> None:
    store = opened(tmp_path)
    append(store, 0)
    for expected in (True, False):
        assert store.has_unwritten is expected
        assert store.body(0) == BODY
        for start, stop in [(0, 1), (CHUNK_BYTES - 1, 2 * CHUNK_BYTES), (CHUNK_BYTES, len(BODY))]:
            assert b"".join(store.part_chunks(0, start, stop)) == BODY[start:stop]
        assert store.headers(0, 1)[0].has_body
        assert (store.gaps(), store.first_with_bodies()) == ([], 0)
        store.write_bodies()
    store.close()
    again = opened(tmp_path)
    assert again.body(0) == BODY
    again.close()


def test_after_a_death_the_entry_is_there_and_its_body_can_come_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    append(store, 0)
    store.write_bodies()
    append(store, 1)
    store.close()
    again = opened(tmp_path)
    assert again.head.position == 2 and again.gaps() == [(1, 2)]
    assert again.first_with_bodies() == 2
    with pytest.raises(NotStored, match="ask another peer"):
        again.body(1)
    assert not append(again, 1, writes_body=True)  # the entry was known
    assert again.body(1) == BODY and again.gaps() == []
    again.close()


def test_a_body_that_was_written_in_part_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITTEN_BYTES", CHUNK_BYTES)
    store = opened(tmp_path)
    append(store, 0)
    insert = store._insert_body

    def full(position: int, body: memoryview, begins: int = 0) -> None:
        if begins:
            raise sqlite3.OperationalError("database or disk is full")
        insert(position, body, begins)

    monkeypatch.setattr(store, "_insert_body", full)
    with pytest.raises(sqlite3.OperationalError):
        store.write_bodies()
    assert store.has_unwritten and store.body(0) == BODY
    store.close()
    again = opened(tmp_path)
    assert again.gaps() == [(0, 1)]
    append(again, 0)
    again.write_bodies()
    assert again.body(0) == BODY
    again.close()


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_body_that_is_void_while_it_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    monkeypatch.setattr(module, "WRITTEN_BYTES", CHUNK_BYTES)
    store = opened(tmp_path)
    append(store, 0, b"kept")
    store.write_bodies()
    append(store, 1)
    insert, other = store._insert_body, bytes(len(BODY))

    def voided(position: int, body: memoryview, begins: int = 0) -> None:
        insert(position, body, begins)
        if not begins and body[:1] != other[:1]:  # between two transactions, as another thread does
            store.rewind(1)
            if is_replaced:
                append(store, 1, other)

    monkeypatch.setattr(store, "_insert_body", voided)
    store.write_bodies()
    store.close()
    again = opened(tmp_path)
    assert again.body(0) == b"kept"
    assert again.head.position == 1 + is_replaced
    if is_replaced:
        assert again.body(1) == other
    rows = again._db.execute("SELECT count(*) FROM bodies").fetchone()[0]
    assert rows == (4 if is_replaced else 1)
    again.close()
