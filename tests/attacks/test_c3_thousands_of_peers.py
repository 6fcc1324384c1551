"""C3: thousands of keys, or honest peers, make every peer flap between online and gone."""

from __future__ import annotations

import heapq
import random
from pathlib import Path

import pytest

from atoll.coordinator.kept_log import TICK_S
from atoll.coordinator.presence import MAX_PEERS, REPORTS_PER_S, KnownPeer, interval_s
from atoll.coordinator.rpc.messages import ALIVE_S, HEARTBEAT_S
from atoll.coordinator.run.status import MAX_PEERS_SHOWN, PeerStatus, RunStatus
from support import kit

MEMBERS = 5_000
SECONDS = 90.0


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def status_of(number: int) -> PeerStatus:
    peer_id = f"12D3KooW{number:044d}"
    return PeerStatus(peer_id=peer_id, incarnation="1", state="joining")


def test_5000_members_that_report_as_asked_stay_online(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            coordinator, clock, rng = net.up.coordinator, Clock(), random.Random(1)
            coordinator._steady = clock
            presence = coordinator.presence
            began_s = clock.now_s
            # They come within ten seconds, and each answer sets the next report.
            due = [(began_s + rng.uniform(0, 10), number) for number in range(MEMBERS)]
            heapq.heapify(due)
            reports, next_tick_s = 0, began_s
            while clock.now_s < began_s + SECONDS:
                clock.now_s, number = heapq.heappop(due)
                while next_tick_s <= clock.now_s:
                    next_tick_s += TICK_S
                    presence.look(clock.now_s)
                coordinator.heartbeat(status_of(number), [], [], leaving=False)
                reports += clock.now_s > began_s + 60
                # The time of the call, and its jitter.
                again_s = clock.now_s + coordinator.heartbeat_s() * rng.uniform(1.0, 1.2)
                heapq.heappush(due, (again_s, number))
            assert len(presence.peers.alive(clock.now_s)) == MEMBERS
            assert coordinator.heartbeat_s() == pytest.approx(MEMBERS / REPORTS_PER_S)
            assert reports / (SECONDS - 60) <= 1.1 * REPORTS_PER_S
            texts = [event.text for event in coordinator.status().events]
            assert not any("gone" in text or "is back" in text for text in texts)
            shown = RunStatus.from_json(coordinator.status().to_json())
            assert len(shown.peers) == MAX_PEERS_SHOWN

    kit.run(main())


def test_the_gone_do_not_slow_the_living(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            coordinator, clock = net.up.coordinator, Clock()
            coordinator._steady = clock
            for number in range(2_400):  # keys that report once
                coordinator.heartbeat(status_of(number), [], [], leaving=False)
            clock.now_s += 3 * 12.0 + 1
            one, *_ = await net.started()
            assert (await one.heartbeat(net.swarm.status(0))).heartbeat_s == HEARTBEAT_S
            assert coordinator.log.replica.opened is not None

    kit.run(main())


def test_a_peer_may_be_silent_as_long_as_it_was_told() -> None:
    slow = KnownPeer(status=status_of(1), seen_s=0.0, told_s=25.0)
    assert slow.is_alive(75.0) and not slow.is_alive(76.0)
    quick = KnownPeer(status=status_of(2), seen_s=0.0)
    assert quick.is_alive(ALIVE_S) and not quick.is_alive(ALIVE_S + 1)
    assert interval_s(1) == HEARTBEAT_S and interval_s(MAX_PEERS) == 60.0 == interval_s(10**6)
