"""Exactly-once data with real processes: a trainer dies, another joins, and no row counts twice."""

import asyncio
import contextlib
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from atoll.optim.log.entry import Entry
from atoll.optim.log.store import LOG_FILE
from atoll.optim.log.units import finished, read_units
from atoll.peer.lab.children import Child
from support.child_runs import PEER, until, write_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TEXT = "No row is trained twice in a pass. " * 3000
ONCE = {"once": True, "same_text": True}


def read_log(folder: Path) -> list[Entry]:
    if not (folder / LOG_FILE).exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{folder / LOG_FILE}?mode=ro", uri=True)) as log:
        rows = log.execute("SELECT entry FROM entries ORDER BY position").fetchall()
    return [Entry.decode(row[0]) for row in rows]


async def hold(folder: Path) -> list[Entry]:
    """Train until a pass is over, while a trainer dies and another joins; return the log."""
    state, invite = folder / "state", folder / "invite"
    spec = write_spec(
        folder, text=TEXT, run={"name": "once", "rounds": 0}, round={"stall_s": 2.0}, data=ONCE
    )
    children: list[Child] = []

    async def start(name: str, *arguments: object) -> Child:
        log = folder / f"{name}.log"
        children.append(await Child.start(name, log, list(map(str, arguments))))
        return children[-1]

    async def join(name: str) -> Child:
        named = ("--data", folder / "text.txt", "--name", name, "--state-dir", folder / name)
        return await start(name, "peer", invite, *PEER, *named)

    def all_train() -> bool:
        log = read_log(state / "log")
        return len({member.peer_id for e in log for member in e.members if member.units}) == 3

    try:
        coordinator = await start(
            "coordinator",
            *("coordinator", spec, "--state-dir", state, "--invite-file", invite),
            "--stop-with-stdin",
        )
        await until(invite.exists, coordinator)
        for name in ("one", "two", "three"):
            await join(name)
        await until(all_train, *children)
        lost = children.pop()
        lost.kill()
        await lost.stop()
        await join("four")
        await until(lambda: read_units(read_log(state / "log")[-1].units).number > 1, *children)
        return read_log(state / "log")
    finally:
        for child in reversed(children):
            await child.stop()


def test_no_unit_counts_twice_though_a_trainer_dies_and_another_joins(tmp_path: Path) -> None:
    log = asyncio.run(hold(tmp_path))
    done, before = Counter[int](), b""
    for entry in log:
        if read_units(before).number == 1:
            for ranges in finished(entry.members, entry.parts, before).values():
                done.update(unit for start, stop in ranges for unit in range(start, stop))
        before = entry.units
    assert done.total() == len(done) > 1000
    assert sorted(done) == list(range(len(done)))
    assert len({member.peer_id for entry in log for member in entry.members if member.units}) == 4
