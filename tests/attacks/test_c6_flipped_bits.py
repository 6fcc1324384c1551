"""C6: flipped bits in the log on disk pass unnoticed at a start, or end the process."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.catching_up import LAG_S
from atoll.coordinator.run.keys import KEYS_FILE, RunKeys, verify_run_key
from atoll.optim.log.entry import genesis_chain
from atoll.optim.log.mending import mend
from atoll.optim.log.replica import Replica
from atoll.optim.log.store import LogStore
from support import kit
from support.donors import Clock, StoreSource, answering, recovering
from support.logs import RUN, Log, open_replica

NEWEST = "position = (SELECT max(position) FROM snapshots)"


def flip(folder: Path, table: str, column: str, where: str) -> None:
    """Flip one bit in the middle of a stored value."""
    with sqlite3.connect(folder / "log.sqlite") as db:
        query = f"SELECT {column} FROM {table} WHERE {where}"
        value = db.execute(query).fetchone()[0]
        if isinstance(value, int):
            changed: Any = value ^ 1
        else:
            raw = bytearray(value.encode() if isinstance(value, str) else value)
            raw[len(raw) // 2] ^= 0x10
            changed = bytes(raw)
        db.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (changed,))
    db.close()


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """One of nine entries, with snapshots each two."""
    log = Log(tmp_path, swarm=kit.Swarm(), keys=RunKeys.generate())
    log.grow(9)
    return log


@pytest.mark.parametrize(
    ("table", "column", "where", "left", "bodies"),
    [
        ("entries", "entry", "position = 3", 3, []),
        ("entries", "chain", "position = 8", 8, []),
        ("entries", "position", "position = 8", 8, []),
        ("entries", "body_bytes", "position = 2", 2, []),
        ("bodies", "data", "position = 1", 9, [1]),
        ("bodies", "data", "position = 8", 8, []),  # after the newest snapshot
        ("snapshots", "layout", NEWEST, 9, []),
        ("snapshots", "chain", NEWEST, 9, []),
        ("epochs", "record", "epoch = 0", 9, []),
    ],
)
def test_the_digests_find_a_flipped_bit(
    log: Log, table: str, column: str, where: str, left: int, bodies: list[int]
) -> None:
    folder = log.folder / "whole"
    log.whole.store.close()
    verify_run = partial(verify_run_key, log.keys.run_public_key)

    def opened() -> LogStore:
        chain = genesis_chain(RUN, kit.genesis().root())
        return LogStore(folder, run_id=RUN, genesis_chain=chain)

    store = opened()
    assert not mend(store, verify_run=verify_run)  # nothing is dropped without cause
    store.close()
    flip(folder, table, column, where)
    store = opened()
    damage = mend(store, verify_run=verify_run)
    assert damage and "check the disk" in str(damage)
    assert store.head.position == left and damage.bodies == bodies
    assert store.gaps() == [(b, b + 1) for b in bodies]
    if table == "snapshots":
        (dropped,) = damage.snapshots
        assert dropped > 0 and dropped not in store.snapshot_positions()
    if table == "epochs":
        assert damage.epochs == [0] and store.latest_epoch() is None
    assert not mend(store, verify_run=verify_run)
    store.close()
    replica = open_replica(folder, log.keys)
    assert replica.state.root() == log.states[replica.state.position].root()
    replica.store.close()


@pytest.mark.parametrize(
    "damaging",
    [
        lambda folder: flip(folder, "bodies", "data", "position = 1"),
        lambda folder: flip(folder, "entries", "entry", "position = 3"),
        lambda folder: flip(folder, "epochs", "record", "epoch = 0"),
    ],
    ids=["body", "entry", "epoch"],
)
def test_a_coordinator_mends_its_log_from_donors(
    tmp_path: Path, damaging: Callable[[Path], None]
) -> None:
    async def main() -> None:
        folder, swarm, clock = tmp_path / "run", kit.Swarm(), Clock()
        async with kit.net(folder, swarm) as net:
            one, *_ = await net.started()
            for _ in range(5):
                entry, body = swarm.entry(net.run_id, net.up.coordinator.head())
                assert await net.publish(one, entry, body)
            before = net.up.coordinator.status()
        shutil.copytree(folder / "log", tmp_path / "donor")
        keys = RunKeys.load_or_create(folder / KEYS_FILE)
        donor: Replica = open_replica(tmp_path / "donor", keys, run_id=net.run_id)
        damaging(folder / "log")
        async with kit.net(folder, swarm) as net:
            coordinator = net.up.coordinator
            coordinator._steady = clock
            texts = [event.text for event in coordinator.status().events]
            assert sum("the log on disk is damaged" in text for text in texts) == 1
            one = net.client(0)
            await one.join()
            coordinator.ask_head_with(answering(swarm, donor))
            catching_up = coordinator.recover_with(recovering(StoreSource(donor)))
            for _ in range(int(4 * LAG_S)):
                clock.now_s += 1.0
                status = swarm.status(0, state="training", position=5)
                beat = await one.heartbeat(status)
                await coordinator.tick()
                if catching_up._task is not None:
                    await catching_up._task
                if beat.publish_from is not None:
                    record = donor.store.get(beat.publish_from)
                    assert record is not None
                    await one.publish(
                        epoch=record.epoch,
                        position=record.position,
                        entry=record.entry,
                        certificate=record.certificate,
                        body=donor.store.body(record.position),
                    )
            assert coordinator.head() == donor.head
            assert coordinator.replica.state.root() == donor.state.root()
            assert coordinator.replica.epoch_record == donor.epoch_record
            assert coordinator.replica.store.gaps() == [] == coordinator.status().gaps
            assert coordinator.status().tokens_total == before.tokens_total
            await catching_up.close()
        donor.store.close()

    kit.run(main())
