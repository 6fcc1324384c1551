"""C5: one source floods Join, Status or Publish, or fills the event log that people read."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.admission_control import EVENT_BURST
from atoll.coordinator.history import EventLog, History
from atoll.coordinator.policies import (
    CALL_BURST,
    MAX_ADDRESSES,
    CallLimits,
    source_of,
)
from atoll.coordinator.rpc.channel import StatusClient
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.status import EVENTS, Event, RoundReport
from support import kit


@pytest.mark.parametrize("call", ["status", "join", "publish"])
def test_a_source_that_calls_without_end_is_slowed_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    take = CallLimits.take
    # A busy machine makes calls no faster than the pace; here they all come in one moment.
    monkeypatch.setattr(CallLimits, "take", lambda self, address, _: take(self, address, 0.0))

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            (one, *_) = await net.started()
            entry, _ = net.swarm.entry(net.run_id, net.up.coordinator.log.head())
            entry = entry.model_copy(update={"position": 7})

            async def once() -> None:
                if call == "join":
                    await net.clients[1].join()
                elif call == "publish":
                    await net.publish(one, entry, b"")
                else:
                    await one.status()

            answered, refused = 0, Counter[str]()
            for _ in range(int(CALL_BURST) + 40):
                try:
                    await once()
                    answered += 1
                except CoordinatorError as error:
                    refused[str(error)] += 1
            assert refused["too many calls; slow down"] > 0
            assert answered <= CALL_BURST
            # Reports of peers have a pace of their own.
            await one.heartbeat(net.swarm.status(0))

    kit.run(main())


def test_each_address_has_a_pace_of_its_own() -> None:
    limits = CallLimits()
    taken = [limits.take("ipv4:203.0.113.7", 0.0) for _ in range(int(CALL_BURST) + 1)]
    assert all(taken[:-1]) and not taken[-1]
    assert limits.take("ipv4:203.0.113.8", 0.0)
    assert limits.take("ipv4:203.0.113.7", 1.0)
    for index in range(2 * MAX_ADDRESSES):
        limits.take(str(index), 2.0)
    assert len(limits.limits) == MAX_ADDRESSES


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        ("ipv4:203.0.113.7:41234", "ipv4:203.0.113.7"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:41234", "ipv6:20010db800010002"),
        ("ipv6:[2001:db8:1:2:ffff::1]:9", "ipv6:20010db800010002"),
        ("unix:", "unix:"),
    ],
)
def test_a_source_is_an_address_or_a_64(peer: str, source: str) -> None:
    assert source_of(peer) == source


def test_one_peers_events_push_out_its_own(tmp_path: Path) -> None:
    clock: Any = lambda: 1000.0  # noqa: E731
    history = History(tmp_path / "history.db")
    log = EventLog(history, clock)
    for index in range(5):
        log.add("info", "honest", f"here {index}")
        log.report("info", f"epoch {index}")
    for index in range(3 * EVENTS):
        log.add("error", "loud", f"noise {index}")

    def counts(log: EventLog) -> Counter[str]:
        return Counter(event.source for event in log.newest())

    assert counts(log) == {"honest": 5, "coordinator": 5, "loud": EVENTS - 10}
    for index in range(400):  # 40 keys
        log.add("error", f"key {index % 40}", "noise")
    assert counts(log)["honest"] == counts(log)["coordinator"] == 5
    assert len(log.newest()) == EVENTS
    assert counts(EventLog(history, clock))["honest"] == 5  # after a restart too
    history.close()


def test_events_and_reports_of_a_flood_are_dropped_before_the_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, *_ = await net.started()
            events = [Event(at=time.time(), level="error", text="x") for _ in range(32)]
            traces = [RoundReport(position=p, included=True) for p in range(32)]
            for _ in range(8):
                await one.heartbeat(net.swarm.status(0), events=events, traces=traces)
            me = net.swarm.identities[0].peer_id
            kept = net.up.coordinator._events._history.events(1000)
            assert sum(e.source == me for e in kept) <= EVENT_BURST + 10
            await asyncio.sleep(0)
            watcher = StatusClient(net.up.invite)
            net.stack.push_async_callback(watcher.close)
            assert len((await watcher.status()).events) <= EVENTS

    kit.run(main())
