"""C8: lies about dead electors open epochs at will, or void what the living hold."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.heads import PeerHead
from atoll.coordinator.kept_log import KeptLog
from atoll.coordinator.policies import LOST_AGAIN_S, SILENT_S, STALL_S
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.rpc.messages import ALIVE_S
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import PeerStatus
from atoll.coordinator.service import server
from atoll.optim.log.module import log_id
from support import kit

STAGE, OTHER = "stage-1", "stage-2"
STAGED = RunSpec.from_dict(
    kit.SPEC.model_dump(mode="json")
    | {"run": {"name": "test", "rounds": 90}}
    | {"topology": {"stages": 2}, "round": {"min_peers": 4}}
)
EVERYONE = (0, 1, 2)


@pytest.fixture(autouse=True)
def only_the_test_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick by real time would open the first epoch before all electors have joined."""
    monkeypatch.setattr(server, "_tick", lambda *args: asyncio.Event().wait())


class Stage:
    """A stage of three electors under a clock of the test's own. No call reaches any of them."""

    def __init__(self, net: kit.Net) -> None:
        self.net = net
        self.now_s = 1000.0
        self.heads: dict[str, PeerHead] = {}
        """those that calls reach after all"""
        self.clients: list[CoordinatorClient] = []

    async def begin(self) -> None:
        """Open the first epoch of both stages, and decide a round of this one."""
        coordinator = self.net.up.coordinator
        coordinator._steady = lambda: self.now_s
        for log in coordinator.logs.values():
            log.ask_head_with(kit.answering(coordinator, None, log))
        for swarm, module in ((kit.Swarm(), OTHER), (self.net.swarm, STAGE)):
            self.clients = [
                CoordinatorClient(self.net.up.invite, identity, module=module)
                for identity in swarm.identities
            ]
            for index, client in enumerate(self.clients):
                self.net.stack.push_async_callback(client.close)
                await client.join()
                await client.heartbeat(swarm.status(index, module=module))
        await coordinator.tick()
        self.log.ask_head_with(self.answer)
        await self.seconds(3, EVERYONE)
        await self.publish()

    async def answer(self, peer_id: str) -> PeerHead | None:
        return self.heads.get(peer_id)

    @property
    def log(self) -> KeptLog:
        return self.net.up.coordinator.logs[STAGE]

    @property
    def place(self) -> tuple[int, int]:
        return self.log.head().epoch, self.log.head().position

    @property
    def electors(self) -> list[tuple[int, str]]:
        """Those of the next position, as index and incarnation."""
        names = [identity.peer_id for identity in self.net.swarm.identities]
        return [(names.index(e.peer_id), e.incarnation) for e in self.log.replica.electorate]

    async def publish(self) -> None:
        """Publish the next entry, under the certificate of the first two electors."""
        head, swarm = self.log.head(), self.net.swarm
        entry, body = swarm.entry(
            log_id(self.net.run_id, STAGE), head, electorate=self.log.replica.electorate
        )
        assert await self.net.publish(self.clients[0], entry, body)

    def head(self, index: int, **changes: Any) -> None:
        """Let a call reach an elector."""
        here = self.log.head()
        values = {
            "peer_id": self.net.swarm.identities[index].peer_id,
            "incarnation": "1",
            "epoch": here.epoch,
            "position": here.position,
            "chain": here.chain,
            "epoch_record": b"",
        }
        found = PeerHead(**{**values, **changes})
        self.heads[found.peer_id] = found

    def status(self, index: int, **changes: Any) -> PeerStatus:
        epoch, position = self.place
        values = {"module": STAGE, "state": "syncing", "epoch": epoch, "position": position}
        return self.net.swarm.status(index, **{**values, **changes})

    async def seconds(self, count: int, here: Sequence[int], **changes: Any) -> int:
        """Let peers report each second; return after how many another epoch has opened."""
        epoch, _ = self.place
        for second in range(count):
            self.now_s += 1.0
            for index in here:
                await self.clients[index].heartbeat(self.status(index, **changes))
            await self.net.up.coordinator.tick()
            if self.place[0] != epoch:
                return second + 1
        return count


def attacked(tmp_path: Path, attack: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run", spec=STAGED) as net:
            stage = Stage(net)
            await stage.begin()
            assert stage.place == (0, 1) and len(stage.electors) == 3
            await attack(stage)

    kit.run(main())


def test_a_survivor_decides_alone_soon_after_the_others_died(tmp_path: Path) -> None:
    async def attack(stage: Stage) -> None:
        assert await stage.seconds(100, [2]) == pytest.approx(ALIVE_S + SILENT_S, abs=2)
        assert (stage.place, stage.electors) == ((1, 1), [(2, "1")])

    attacked(tmp_path, attack)


def test_silence_that_a_call_ends_opens_no_epoch(tmp_path: Path) -> None:
    """Two electors are cut off from the coordinator alone, and decide rounds meanwhile."""

    async def attack(stage: Stage) -> None:
        stage.head(1)
        assert await stage.seconds(50, [2]) == 50
        stage.head(1, incarnation="2")  # it is another process, which votes no longer
        assert await stage.seconds(50, [2]) < 10

    attacked(tmp_path, attack)


@pytest.mark.parametrize("by_call", [True, False])
def test_an_entry_that_a_survivor_holds_is_not_voided(tmp_path: Path, by_call: bool) -> None:
    """The dead decided it with the survivor, and it is not here yet. It may also be a lie."""

    async def attack(stage: Stage) -> None:
        ahead = {"position": 2}
        if by_call:
            stage.head(2, **ahead)
        assert await stage.seconds(40, [2], **({} if by_call else ahead)) == 40
        if by_call:  # a liar has nothing to send
            waits_s = STALL_S - 40
            assert await stage.seconds(100, [2]) == pytest.approx(waits_s, abs=3)
            return
        await stage.publish()
        assert await stage.seconds(40, [2]) <= 2
        assert (stage.place, stage.electors) == ((1, 2), [(2, "1")])

    attacked(tmp_path, attack)


def test_electors_that_restart_ever_again_open_few_epochs(tmp_path: Path) -> None:
    async def attack(stage: Stage) -> None:
        for number in range(2, 600):
            await stage.seconds(1, [0, 1], incarnation=str(number))
            await stage.seconds(1, [2])
        # 600 restarts in 1,200 s. Pauses are 10, 20, 40, ... s, and those of a run that stands
        # still 60, 120, 240, ... s.
        assert 3 <= stage.place[0] <= 12
        assert stage.electors[0] == (2, "1")  # of two, the one that stays would decide alone

    attacked(tmp_path, attack)


def test_rounds_between_restarts_do_not_let_epochs_open_at_will(tmp_path: Path) -> None:
    async def attack(stage: Stage) -> None:
        opened = 0
        for number in range(2, 50):
            opened += await stage.seconds(1, [0, 1], incarnation=str(number)) == 1
            stage.log._epochs._lost.position -= 1  # as if a round had been decided
        assert stage.place[0] <= 48 / LOST_AGAIN_S + 1
        assert opened

    attacked(tmp_path, attack)


def test_one_of_three_that_restarts_opens_no_epoch(tmp_path: Path) -> None:
    async def attack(stage: Stage) -> None:
        for number in range(2, 20):
            await stage.seconds(1, [0], incarnation=str(number))
            await stage.seconds(1, [1, 2])
        assert stage.place == (0, 1)

    attacked(tmp_path, attack)
