"""A log in use is checked too: as bodies are sent, and by a slow pass over all of it.

What a start finds is in tests/attacks/test_c6_flipped_bits.py.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import accumulate, combinations_with_replacement
from pathlib import Path

import pytest

from atoll.coordinator.run.keys import RunKeys
from atoll.optim.log.entry import verify_key
from atoll.optim.log.mending import Scrub, checked_body, mend
from atoll.optim.log.store import LOG_FILE
from atoll.optim.log.store_errors import Damaged, NotStored
from support import kit
from support.logs import Log, flip

ALL = 1 << 30


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """One of nine entries, with snapshots each two."""
    log = Log(tmp_path, swarm=kit.Swarm(), keys=RunKeys.generate())
    log.grow(9)
    yield log
    log.whole.store.close()


def test_a_body_is_sent_as_it_is(log: Log) -> None:
    store = log.whole.store
    for position, (_, body) in enumerate(log.entries):
        assert b"".join(checked_body(store, position)) == body
    assert store.take_damaged() == []
    with pytest.raises(NotStored):
        next(checked_body(store, 9))


def parts_of(log: Log, position: int) -> list[int]:
    """Return where the parts of a body end."""
    return list(accumulate(part.wire_bytes for part in log.entries[position][0].entry.parts))


def test_a_piece_of_a_body_is_sent_as_it_is(log: Log) -> None:
    store, (_, body) = log.whole.store, log.entries[3]
    cuts = [0, 1, *(end + n for end in parts_of(log, 3) for n in (-1, 0, 1)), len(body) + 9]
    for start, stop in combinations_with_replacement(cuts[:-2], 2):
        assert b"".join(checked_body(store, 3, start, stop)) == body[start:stop]
    for start, stop in ((2, 1), (len(body) + 1, len(body) + 2)):
        with pytest.raises(NotStored):
            next(checked_body(store, 3, start, stop))
    assert store.take_damaged() == []


def test_a_piece_is_checked_where_it_has_a_whole_part_and_reads_no_more(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, middle = log.whole.store, len(log.entries[3][1]) // 2
    flip(log.folder / "whole", "bodies", "data", "position = 3")  # in the middle
    end = next(end for end in parts_of(log, 3) if end > middle)
    begin = max([0, *(end for end in parts_of(log, 3) if end <= middle)])
    read, part_chunks = list[tuple[int, int]](), store.part_chunks

    def reading(position: int, start: int, stop: int) -> Iterator[bytes]:
        read.append((start, min(stop, len(log.entries[3][1]))))
        return part_chunks(position, start, stop)

    monkeypatch.setattr(store, "part_chunks", reading)
    for start, stop in ((end - 1, end), (begin + 1, end), (begin, end - 1)):
        assert b"".join(checked_body(store, 3, start, stop))
    assert read == [(end - 1, end), (begin + 1, end), (begin, end - 1)]
    assert store.take_damaged() == []
    with pytest.raises(Damaged):
        list(checked_body(store, 3, begin, end))
    assert store.take_damaged() == [3]


def test_no_body_is_sent_whose_entry_cannot_be_read(log: Log) -> None:
    store = log.whole.store
    with closing(sqlite3.connect(log.folder / "whole" / LOG_FILE)) as db, db:
        db.execute("UPDATE entries SET entry = x'00' WHERE position = 3")
    with pytest.raises(NotStored, match="entry 3 is damaged on the disk"):
        next(checked_body(store, 3))
    assert store.take_damaged() == []  # its body may be whole


@pytest.mark.parametrize("damage", ["a bit", "cut off", "too long"])
def test_a_damaged_body_is_given_to_nobody_and_dropped(log: Log, damage: str) -> None:
    store, folder = log.whole.store, log.folder / "whole"
    if damage == "a bit":
        flip(folder, "bodies", "data", "position = 3")
    else:
        body = log.entries[3][1]
        wrong = body[:-1] if damage == "cut off" else body + b"more"
        store._db.execute("UPDATE bodies SET data = ? WHERE position = 3", (wrong,))
        store._db.commit()
    with pytest.raises(Damaged, match="the body of entry 3 was damaged"):
        list(checked_body(store, 3))
    assert store.gaps() == [(3, 4)] and store.first_with_bodies() == 4
    assert store.take_damaged() == [3] and store.take_damaged() == []
    log.whole.add_body(3, log.entries[3][1])
    assert b"".join(checked_body(store, 3)) == log.entries[3][1]


def test_a_body_that_is_replaced_while_it_is_read_is_not_damaged(log: Log) -> None:
    store = log.whole.store
    old, body = store.headers(8, 1)[0], log.entries[8][1]
    reading = checked_body(store, 8)
    other = old.entry[:-1] + bytes([old.entry[-1] ^ 1])
    whole = store.get

    def read_before_the_change(position: int) -> object:
        store.get = whole
        store.rewind(8)
        wrong = bytes([body[0] ^ 1]) + body[1:]
        store.append(
            epoch=old.epoch, position=8, entry=other, certificate=b"", body=wrong, chain=old.chain
        )
        return old

    store.get = read_before_the_change
    with pytest.raises(NotStored, match="was replaced"):
        list(reading)
    assert store.take_damaged() == [] and store.headers(8, 1)[0].has_body


def test_a_scrub_finds_what_has_rotted_piece_by_piece(log: Log) -> None:
    store, folder = log.whole.store, log.folder / "whole"
    scrub = Scrub(store)
    assert scrub.step(ALL) and store.take_damaged() == []
    for position in (1, 6):
        flip(folder, "bodies", "data", f"position = {position}")
    newest = store.snapshot(store.snapshot_positions()[-1])
    newest.path.write_bytes(b"rotten" + newest.path.read_bytes()[6:])
    steps, found = 1, []
    while not scrub.step(1):
        steps, found = steps + 1, found + store.take_damaged()
    assert found == [6, 1]  # the newest first: peers may still have it
    assert steps > len(log.entries)  # a step reads no more than it has to
    assert scrub.damaged_snapshots == [newest.position]
    assert newest.position not in store.snapshot_positions()
    assert scrub.step(ALL) and store.take_damaged() == []


def test_a_first_state_that_has_rotted_stays_for_its_owner(log: Log) -> None:
    first = log.whole.store.snapshot(0)
    first.path.write_bytes(b"rotten" + first.path.read_bytes()[6:])
    scrub = Scrub(log.whole.store)
    assert scrub.step(ALL)
    assert scrub.damaged_snapshots == [0] and 0 in log.whole.store.snapshot_positions()


def test_a_scrub_goes_on_while_the_log_grows_and_is_pruned(log: Log) -> None:
    scrub = Scrub(log.whole.store)
    assert not scrub.step(1)
    log.grow(3)
    log.whole.store.drop_bodies([7, 8])
    while not scrub.step(1):
        pass
    assert log.whole.store.take_damaged() == []


@pytest.mark.parametrize("column", ["epoch", "entry", "chain", "body_bytes"])
def test_a_value_that_has_rotted_ends_no_start(log: Log, column: str) -> None:
    store = log.whole.store
    with closing(sqlite3.connect(log.folder / "whole" / LOG_FILE)) as db, db:
        db.execute(f"UPDATE entries SET {column} = 'rot' WHERE position = 8")
    damage = mend(store, verify_run=partial(verify_key, log.keys.run_public_key))
    assert (damage.entries_from, damage.entries) == (8, 1)
    assert store.head.position == 8


def test_a_certificate_that_has_rotted_is_dropped_alone(log: Log) -> None:
    store = log.whole.store
    with closing(sqlite3.connect(log.folder / "whole" / LOG_FILE)) as db, db:
        db.execute("UPDATE entries SET certificate = 'rot' WHERE position = 8")
    damage = mend(store, verify_run=partial(verify_key, log.keys.run_public_key))
    assert (damage.entries, damage.certificates) == (0, [8])
