"""A peer's line to the coordinator, without one, and with waits that cost nothing."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from atoll.coordinator.client import Beat
from atoll.coordinator.client_errors import (
    CoordinatorError,
    CoordinatorUnreachable,
    Invalid,
    NotWelcome,
    WrongCertificate,
)
from atoll.coordinator.link import MAX_BACKOFF_S, Link, backoff_s
from atoll.coordinator.status import Event, PeerStatus, RoundTrace
from atoll.optim.store import Head

BEAT = Beat(
    epoch=b"",
    head=Head(epoch=0, position=0, chain=bytes(32)),
    bootstrap=(),
    publish_from=None,
    admission=b"",
    finished=False,
    heartbeat_s=1.0,
)


class FakeClient:
    """Fails as told, and counts."""

    def __init__(self, failures: list[CoordinatorError | None]) -> None:
        self.failures = failures
        self.joins = 0
        self.joined = False
        self.events: list[Event] = []
        self.traces: list[RoundTrace] = []

    async def join(self) -> str:
        self._fail()
        self.joins += 1
        self.joined = True
        return "joined"

    async def heartbeat(self, status: PeerStatus, **reports: Any) -> Beat:
        self._fail()
        self.events += reports["events"]
        self.traces += reports["traces"]
        return BEAT

    def _fail(self) -> None:
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure


def make(client: FakeClient, beats: int) -> tuple[Link, list[float]]:
    slept: list[float] = []
    left = beats

    async def on_beat(beat: Beat) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise asyncio.CancelledError

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    link = Link(
        client,  # type: ignore[arg-type]
        status=lambda: PeerStatus(peer_id="p"),
        on_beat=on_beat,
        rng=random.Random(1),
        sleep=sleep,
    )
    return link, slept


def run_until_cancelled(link: Link) -> None:
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(link.run(), 10))


def test_a_hundred_failures_do_not_end_it() -> None:
    client = FakeClient([CoordinatorUnreachable("gone")] * 100)
    link, slept = make(client, beats=2)
    run_until_cancelled(link)
    assert client.joins == 1 and link.statistics().connected
    assert len(slept) >= 100 and max(slept) <= MAX_BACKOFF_S and slept[0] <= 0.5


def test_what_could_not_be_delivered_is_kept() -> None:
    client = FakeClient([None, CoordinatorUnreachable("gone"), CoordinatorUnreachable("gone")])
    link, _ = make(client, beats=3)
    traces = [RoundTrace(position=p, included=True) for p in range(40)]
    for trace in traces:
        link.trace(trace)
    link.event(Event(at=0.0, text="hello"))
    run_until_cancelled(link)
    assert client.traces == traces
    assert [event.text for event in client.events] == ["hello"]
    assert link.statistics().undelivered == 0


def test_a_session_that_ran_out_is_renewed() -> None:
    client = FakeClient([None, None, NotWelcome("unauthenticated", "join first")])
    link, _ = make(client, beats=2)
    run_until_cancelled(link)
    assert client.joins == 2


def test_a_report_that_is_refused_does_not_block_the_line() -> None:
    client = FakeClient([None, Invalid("invalid_argument", "no such trace")])
    link, _ = make(client, beats=1)
    link.event(Event(at=0.0, text="bad"))
    run_until_cancelled(link)
    assert client.events == []


@pytest.mark.parametrize(
    "error", [WrongCertificate("another"), NotWelcome("permission_denied", "token")]
)
def test_what_a_person_must_put_right_ends_it_at_the_start_only(error: CoordinatorError) -> None:
    link, _ = make(FakeClient([error]), beats=1)
    with pytest.raises(type(error)):
        asyncio.run(link.run())
    link, _ = make(FakeClient([None, None, error]), beats=2)
    run_until_cancelled(link)


def test_backoff_grows_with_jitter_to_a_limit() -> None:
    rng = random.Random(0)
    waits = [backoff_s(n, rng) for n in range(1, 40)]
    assert 0.25 <= waits[0] <= 0.5 and all(15 <= wait <= 30 for wait in waits[10:])
    assert len({round(wait, 6) for wait in waits}) == len(waits)
