"""Keepers at the coordinator: who opens an epoch with whom, under a clock of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import pytest

from atoll.coordinator import kept_log
from atoll.coordinator.coordinator import Coordinator
from atoll.coordinator.heads import PeerHead
from atoll.coordinator.invites import INVITES_FILE, USES_FILE, evict, issue
from atoll.coordinator.policies import KEEPER_WAIT_S, STALL_S
from atoll.coordinator.report.plain import render_status
from atoll.coordinator.report.view import waits_for
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.rpc.client_errors import NotWelcome
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import PeerStatus
from atoll.dht import Identity
from atoll.optim.log.entry import Elector
from support import kit

SPEC = RunSpec.from_dict(
    kit.SPEC.model_dump()
    | {"run": {"name": "test", "rounds": 20}}
    | {"round": {"min_peers": 2, "snapshot_every": 2, "electors": "keepers"}}
)


@dataclass
class Hall:
    """A coordinator whose swarm of three are keepers, beside trainers."""

    net: kit.Net
    now_s: float = 1000.0
    here: dict[Identity, tuple[CoordinatorClient, str]] = field(default_factory=dict)
    keeper_token: bytes = b""

    @property
    def coordinator(self) -> Coordinator:
        return self.net.up.coordinator

    @property
    def keepers(self) -> list[Identity]:
        return self.net.swarm.identities

    async def join(self, identity: Identity, *, keeper: bool, incarnation: str = "1") -> None:
        invite = self.net.up.invite
        if keeper:
            invite = replace(invite, token=self.keeper_token)
        client = CoordinatorClient(invite, identity)
        self.net.stack.push_async_callback(client.close)
        await client.join()
        self.here[identity] = client, incarnation

    async def publish(self) -> None:
        client, _ = next(iter(self.here.values()))
        entry, body = self.net.swarm.entry(self.coordinator.run_id, self.coordinator.log.head())
        electorate = self.coordinator.log.replica.electorate
        assert await self.net.publish(
            client, entry.model_copy(update={"electorate": electorate}), body
        )

    async def pass_time(self, seconds: float, state: str = "training") -> None:
        for _ in range(round(seconds)):
            self.now_s += 1.0
            for identity, (client, incarnation) in self.here.items():
                status = PeerStatus(
                    peer_id=identity.peer_id,
                    incarnation=incarnation,
                    state=state,
                    epoch=self.coordinator.log.head().epoch,
                    position=self.coordinator.log.head().position,
                    role="keeper",  # as everybody claims
                )
                await client.heartbeat(status)
            await self.coordinator.tick()

    async def open_between_rounds(self, epoch: int) -> None:
        """Decide rounds until an epoch opens; answers that a busy machine delays miss a round."""
        for _ in range(20):
            await self.publish()
            await self.pass_time(2)
            if self.coordinator.log.head().epoch == epoch:
                return
        raise AssertionError(f"epoch {epoch} has not opened")

    def electors(self) -> set[str]:
        return {e.peer_id for e in self.coordinator.log.replica.electorate}

    def texts(self) -> list[str]:
        return [event.text for event in self.coordinator.status().events]

    def waits(self) -> list[str]:
        return [text for text in self.texts() if "waiting for 1 keeper" in text]


@contextlib.asynccontextmanager
async def hall(folder: Path) -> AsyncIterator[Hall]:
    async with kit.net(folder, spec=SPEC) as net:
        found = Hall(net=net)
        net.up.coordinator._steady = lambda: found.now_s
        net.up.coordinator.log.ask_head_with(kit.answering(net.up.coordinator))
        _, found.keeper_token = issue(folder, kind="keeper", uses=9)
        # Each look for an epoch ends within its tick, however busy the disk is.
        with patch.object(kept_log, "TICK_S", 60.0):
            yield found


async def started(it: Hall) -> None:
    for keeper in it.keepers:
        await it.join(keeper, keeper=True)
    for _ in range(2):
        await it.join(Identity.ephemeral(), keeper=False)
    await it.pass_time(1, state="ready")
    assert it.coordinator.log.head().epoch == 0 and it.electors()


def test_a_run_of_trainers_alone_waits_for_a_keeper(tmp_path: Path) -> None:
    async def main() -> None:
        async with hall(tmp_path / "run") as it:
            for _ in range(3):
                await it.join(Identity.ephemeral(), keeper=False)
            await it.pass_time(3, state="ready")
            status = it.coordinator.status()
            assert status.state == "waiting"
            assert waits_for(status) == "3 of at least 2 trainers and 0 of 1 keeper"
            assert {peer.role for peer in status.peers} == {"trainer"}
            (told,) = it.waits()
            assert "atoll invite --role keeper" in told
            await it.join(it.keepers[0], keeper=True)
            await it.pass_time(1, state="ready")
            assert it.electors() == {it.keepers[0].peer_id}
            table = render_status(it.coordinator.status())
            assert table.count("keeper") == 1

    kit.run(main())


def test_keepers_do_not_count_as_peers(tmp_path: Path) -> None:
    async def main() -> None:
        async with hall(tmp_path / "run") as it:
            for keeper in it.keepers:
                await it.join(keeper, keeper=True)
            await it.join(Identity.ephemeral(), keeper=False)
            await it.pass_time(2, state="ready")
            assert it.coordinator.status().state == "waiting"
            await it.join(Identity.ephemeral(), keeper=False)
            await it.pass_time(1, state="ready")
            assert it.electors() == {keeper.peer_id for keeper in it.keepers}

    kit.run(main())


def test_a_round_names_no_keeper_as_left_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with hall(tmp_path / "run") as it:
            await started(it)
            await it.publish()
            (row,) = it.coordinator.status().history
            assert row.left_out == []

    kit.run(main())


def test_a_stalled_run_gets_an_epoch_of_the_keepers_that_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with hall(tmp_path / "run") as it:
            await started(it)
            await it.publish()
            for keeper in it.keepers[:2]:
                del it.here[keeper]
            await it.pass_time(STALL_S + 5)
            head = it.coordinator.log.head()
            assert (head.epoch, head.position) == (1, 1)
            assert it.electors() == {it.keepers[2].peer_id}  # and no trainer

    kit.run(main())


def test_without_any_keeper_no_epoch_opens(tmp_path: Path) -> None:
    async def main() -> None:
        async with hall(tmp_path / "run") as it:
            await started(it)
            for keeper in it.keepers:
                del it.here[keeper]
            before = len(it.waits())
            await it.pass_time(STALL_S + 20)
            assert it.coordinator.log.head().epoch == 0
            assert it.coordinator.status().state == "stalled"
            assert len(it.waits()) == before + 1
            await it.join(it.keepers[0], keeper=True)
            await it.pass_time(5)
            assert it.electors() == {it.keepers[0].peer_id}

    kit.run(main())


def test_a_keeper_that_joins_enters_between_two_rounds(tmp_path: Path) -> None:
    async def main() -> None:
        async with hall(tmp_path / "run") as it:
            await started(it)
            await it.publish()
            late = Identity.ephemeral()
            await it.join(late, keeper=True)
            await it.pass_time(KEEPER_WAIT_S / 4)
            await it.publish()
            await it.pass_time(KEEPER_WAIT_S / 4)
            assert it.coordinator.log.head().epoch == 0  # it has not waited for long
            await it.publish()
            await it.pass_time(KEEPER_WAIT_S / 2 - 10)
            await it.publish()
            await it.pass_time(20)  # in the middle of a round
            assert it.coordinator.log.head().epoch == 0
            await it.open_between_rounds(epoch=1)
            assert it.electors() == {i.peer_id for i in [*it.keepers, late]}
            assert any("with 4 keepers: 1 keeper joined" in text for text in it.texts())
            await it.pass_time(KEEPER_WAIT_S / 4)
            assert it.coordinator.log.head().epoch == 1  # nobody waits

    kit.run(main())


def test_an_evicted_keeper_loses_its_vote_between_two_rounds(tmp_path: Path) -> None:
    """No entry changes the keepers, so it led and voted until the run stood still."""

    async def main() -> None:
        async with hall(tmp_path / "run") as it:
            await started(it)
            await it.publish()
            await it.pass_time(10)
            bad, *good = it.keepers
            evict(tmp_path / "run", bad.peer_id, at_s=it.coordinator.now_s())
            await it.coordinator.tick()  # in the middle of a round
            del it.here[bad]
            assert it.coordinator.log.head().epoch == 0
            await it.open_between_rounds(epoch=1)
            assert it.electors() == {keeper.peer_id for keeper in good}
            assert any("with 2 keepers: 1 keeper evicted" in text for text in it.texts())
            await it.pass_time(2)
            assert it.coordinator.log.head().epoch == 1  # once

    kit.run(main())


def test_no_epoch_elects_whoever_is_evicted_while_it_is_called(tmp_path: Path) -> None:
    async def main() -> None:
        async with hall(tmp_path / "run") as it:
            for keeper in it.keepers:
                await it.join(keeper, keeper=True)
            for _ in range(2):
                await it.join(Identity.ephemeral(), keeper=False)
            bad = it.keepers[0].peer_id
            answer = kit.answering(it.coordinator)

            async def ask(peer_id: str) -> PeerHead | None:
                if not it.coordinator.admission.is_evicted(bad):
                    evict(tmp_path / "run", bad, at_s=it.coordinator.now_s())
                    it.coordinator.admission.refresh()
                return await answer(peer_id)

            it.coordinator.log.ask_head_with(ask)
            await it.pass_time(1, state="ready")
            assert it.electors() == {keeper.peer_id for keeper in it.keepers[1:]}

    kit.run(main())


def test_a_keeper_that_lost_its_disk_votes_from_the_next_epoch_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with hall(tmp_path / "run") as it:
            await started(it)
            keeper = it.keepers[0]
            it.here[keeper] = it.here[keeper][0], "2"
            for _ in range(6):
                await it.publish()
                await it.pass_time(KEEPER_WAIT_S / 5)
            electors = it.coordinator.log.replica.electorate
            assert it.coordinator.log.head().epoch == 1
            assert Elector(peer_id=keeper.peer_id, incarnation="2") in electors
            assert len(electors) == 3

    kit.run(main())


def test_a_keeper_whose_invite_is_forgotten_does_not_train(tmp_path: Path) -> None:
    """The coordinator was restored from a copy that is older than the invite; anybody may train."""
    spec = RunSpec.from_dict(
        SPEC.model_dump() | {"coordinator": SPEC.coordinator.model_dump() | {"invite_only": False}}
    )

    async def main() -> None:
        async with kit.net(tmp_path, spec=spec) as net:
            _, token = issue(tmp_path, kind="keeper")
            keeper = net.swarm.identities[0]
            invite = replace(net.up.invite, token=token)
            running = CoordinatorClient(invite, keeper)
            net.stack.push_async_callback(running.close)
            assert (await running.join()).role == "keeper"
            for kept in (INVITES_FILE, USES_FILE):
                (tmp_path / kept).write_text("{}")
            net.up.coordinator.admission._desk.refresh()
            net.up.coordinator.admission._admitted_until_s.clear()  # as after a restore
            status = PeerStatus(
                peer_id=keeper.peer_id,
                incarnation="1",
                state="training",
                epoch=0,
                position=0,
                role="keeper",
            )
            with pytest.raises(NotWelcome, match="does not know this keeper any more"):
                await running.heartbeat(status)
            assert not running.joined  # its session would count as a trainer's
            started = CoordinatorClient(invite, keeper, was_keeper=True)
            net.stack.push_async_callback(started.close)
            for client in (running, started):
                with pytest.raises(NotWelcome, match="does not know this keeper any more"):
                    await client.join()
            assert (await net.client(1).join()).role == "trainer"

    asyncio.run(main())
