"""When the coordinator reads its log again, and what it does with what has rotted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.coordinator import scrubbing
from atoll.coordinator.first_state import ROOT_FILE, ROOT_NOTE, FirstState
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.scrubbing import PASS_S, STEP_S, Scrubbing
from atoll.optim.log.live_replica import LiveReplica
from atoll.optim.log.mending import reads_whole
from atoll.optim.state.outer_state import OuterState
from support import kit
from support.logs import Log, flip


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """One of nine entries."""
    log = Log(tmp_path, swarm=kit.Swarm(), keys=RunKeys.generate())
    log.grow(9)
    yield log
    log.whole.store.close()


def first_of(log: Log, make: Callable[[], OuterState]) -> FirstState:
    path = log.folder / ROOT_FILE
    path.write_text(kit.genesis().root().hex())
    return FirstState(make, path)


def other_state() -> OuterState:
    params_N = kit.genesis().params_N
    return kit.SPEC.method().genesis(kit.LAYOUT, params_N + 1.0)


def no_state() -> OuterState:
    raise ValueError("the weights are gone")


def scrub_rotten_first_state(log: Log, make: Callable[[], OuterState]) -> list[str]:
    """Spoil the first state, read the log twice; return what was told."""
    store, told = log.whole.store, list[str]()
    path = store.snapshot(0).path
    path.write_bytes(b"rotten" + path.read_bytes()[6:])

    async def main() -> None:
        replica = LiveReplica(log.whole, compute=asyncio.to_thread)
        first = first_of(log, make)
        scrubbing = Scrubbing(replica, first, lambda level, text: told.append(str(text)))
        scrubbing.look(0.0)
        for now_s in (PASS_S, 3 * PASS_S):
            scrubbing.look(now_s)
            await scrubbing.close()

    asyncio.run(asyncio.wait_for(main(), 60.0))
    return told


def test_a_first_state_that_rots_is_made_again_at_once(log: Log) -> None:
    (told,) = scrub_rotten_first_state(log, kit.genesis)
    assert "the first state, which is made again here" in told
    assert reads_whole(log.whole.store, 0)


def test_a_first_state_that_is_another_now_gives_way_to_a_later_one(log: Log) -> None:
    (told,) = scrub_rotten_first_state(log, other_state)
    store = log.whole.store
    assert "snapshots 0" in told
    assert 0 not in store.snapshot_positions() != []
    assert store.note(ROOT_NOTE) == kit.genesis().root()


def test_a_first_state_that_cannot_be_made_is_told_each_time(log: Log) -> None:
    told = scrub_rotten_first_state(log, no_state)
    assert len(told) == 2
    assert all("cannot be made again: the weights are gone" in line for line in told)
    assert 0 in log.whole.store.snapshot_positions()


def test_the_log_is_read_in_steps_and_then_again(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubbing, "STEP_BYTES", 1)
    store, told = log.whole.store, list[str]()
    for position in (1, 7):
        flip(log.folder / "whole", "bodies", "data", f"position = {position}")
    newest = store.snapshot(store.snapshot_positions()[-1])
    newest.path.write_bytes(b"rotten" + newest.path.read_bytes()[6:])

    async def main() -> None:
        replica = LiveReplica(log.whole, compute=asyncio.to_thread)
        scrubbing = Scrubbing(
            replica, first_of(log, kit.genesis), lambda level, text: told.append(text)
        )

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
