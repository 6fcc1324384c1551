"""When the coordinator reads its log again, and what it does with what has rotted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.coordinator import scrubbing
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.scrubbing import PASS_S, STEP_S, Scrubbing
from atoll.optim.log.replica import LiveReplica
from support import kit
from support.logs import Log, flip


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """One of nine entries."""
    log = Log(tmp_path, swarm=kit.Swarm(), keys=RunKeys.generate())
    log.grow(9)
    yield log
    log.whole.store.close()


def test_the_log_is_read_in_steps_and_then_again(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubbing, "STEP_BYTES", 1)
    store, told = log.whole.store, list[str]()
    for position in (1, 7):
        flip(log.folder / "whole", "bodies", "data", f"position = {position}")
    newest = store.snapshot(store.snapshot_positions()[-1])
    newest.path.write_bytes(b"rotten" + newest.path.read_bytes()[6:])

    async def main() -> None:
        replica = LiveReplica(log.whole, compute=asyncio.to_thread)
        scrubbing = Scrubbing(replica, lambda level, text: told.append(text))

        async def look(now_s: float) -> list[int]:
            scrubbing.look(now_s)
            await scrubbing.close()
            return store.take_damaged()

        assert await look(0.0) == []  # a start has read all of it
        assert await look(PASS_S - 1) == [] == told
        found, now_s = list[int](), PASS_S
        for _ in range(100):
            found += await look(now_s)
            now_s += STEP_S
        assert found == [7, 1]

    asyncio.run(asyncio.wait_for(main(), 60.0))
    assert len(told) == 1 and f"snapshots {newest.position}" in told[0]
    assert newest.position not in store.snapshot_positions()
