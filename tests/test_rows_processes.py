"""Exactly-once data with real processes: a trainer dies, another joins, and no row counts twice."""

import asyncio
import contextlib
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from atoll.optim.log.entry import Entry
from atoll.optim.log.store import LOG_FILE
from atoll.optim.log.units import finished, read_units
from atoll.peer.lab.children import Child
from support.child_runs import PEER, start_child, until, write_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEXT = "No row is trained twice in a pass. " * 3000
ONCE = {"once": True, "same_text": True}


def read_log(folder: Path) -> list[Entry]:
    if not (folder / LOG_FILE).exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{folder / LOG_FILE}?mode=ro", uri=True)) as log:
        rows = log.execute("SELECT entry FROM entries ORDER BY position").fetchall()
    return [Entry.decode(row[0]) for row in rows]


def trainers(log: list[Entry]) -> set[str]:
    """Return the peers whose units a log has."""
    return {member.peer_id for entry in log for member in entry.members if member.units}


async def hold(folder: Path) -> list[Entry]:
    """Train until a pass is over and all had units, while a trainer dies and another joins."""
    state, invite = folder / "state", folder / "invite"
    spec = write_spec(
        folder,
        text=TEXT,
        run={"name": "once", "rounds": 0},
        round={"stall_s": 2.0},
        data=ONCE,
        inner_steps=128,  # shorter rounds are over before a newcomer has followed them
    )
    children: list[Child] = []

    async def start(name: str, *arguments: object) -> Child:
        children.append(await start_child(name, folder / f"{name}.log", arguments))
        return children[-1]

    async def join(name: str) -> Child:
        named = ("--data", folder / "text.txt", "--name", name, "--state-dir", folder / name)
        return await start(name, "peer", invite, *PEER, *named)

    def log_of(*, count: int, passes: int = 0) -> list[Entry]:
        log = read_log(state / "log")
        if len(trainers(log)) < count or read_units(log[-1].units).number <= passes:
            return []
        return log

    try:
        coordinator = await start(
            "coordinator",
            *("coordinator", spec, "--state-dir", state, "--invite-file", invite),
            "--stop-with-stdin",
        )
        await until(invite.exists, coordinator)
        for name in ("one", "two", "three"):
            await join(name)
        await until(lambda: log_of(count=3), *children)
        lost = children.pop()
        lost.kill()
        await lost.stop()
        await join("four")
        return await until(lambda: log_of(count=4, passes=1), *children)
    finally:
        for child in reversed(children):
            await child.stop()


def test_no_unit_counts_twice_though_a_trainer_dies_and_another_joins(tmp_path: Path) -> None:
    log = asyncio.run(hold(tmp_path))
    done, before = defaultdict[int, Counter[int]](Counter), b""
    for entry in log:
        number = read_units(before).number
        for ranges in finished(entry.members, entry.parts, before).values():
            done[number].update(unit for start, stop in ranges for unit in range(start, stop))
        before = entry.units
    over = range(1, read_units(before).number)
    assert all(counts.total() == len(counts) for counts in done.values())
    assert all(sorted(done[number]) == list(range(len(done[1]))) for number in over)
    assert len(done[1]) > 1000
    assert len(trainers(log)) == 4
