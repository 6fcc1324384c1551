"""The logs of a run of two modules at its coordinator, each with peers of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.coordinator import PLACED_S
from atoll.coordinator.presence import MAX_PEERS
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.admission import Role
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import PeerStatus
from atoll.dht.identity import Identity
from atoll.optim.log.module import log_id
from support.kit import SPEC, Net, Swarm, answering

FIRST, SECOND = "stage-1", "stage-2"
STAGED = RunSpec.from_dict(
    SPEC.model_dump(mode="json") | {"topology": {"stages": 2}, "round": {"min_peers": 4}}
)


async def joined(net: Net, swarm: Swarm, module: str) -> list[CoordinatorClient]:
    """Let the peers of a module join; if others are at each other module, its log begins."""
    net.swarm = swarm
    clients = [net.client(index, module=module) for index in range(3)]
    for index, client in enumerate(clients):
        assert (await client.join()).module == module
        await client.heartbeat(swarm.status(index, module=module))
    await net.up.coordinator.tick()
    return clients


async def begun(net: Net, one: Swarm, other: Swarm) -> tuple[CoordinatorClient, CoordinatorClient]:
    """Let peers of both modules join; return one of each."""
    for log in net.up.coordinator.logs.values():
        log.ask_head_with(answering(net.up.coordinator, None, log))
    first, *_ = await joined(net, one, FIRST)
    assert all(log.replica.opened is None for log in net.up.coordinator.logs.values())
    second, *_ = await joined(net, other, SECOND)
    await net.up.coordinator.tick()
    assert all(log.replica.opened is not None for log in net.up.coordinator.logs.values())
    return first, second


async def publish(net: Net, client: CoordinatorClient, swarm: Swarm, module: str) -> bool:
    """Publish the module's next entry; return whether it was accepted."""
    net.swarm = swarm
    log = net.up.coordinator.logs[module]
    return await net.publish(client, *swarm.entry(log_id(net.run_id, module), log.head()))


def test_a_pipeline_waits_for_a_peer_at_each_stage(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        few = STAGED.model_copy(update={"round": STAGED.round.model_copy(update={"min_peers": 3})})
        async with kit.net(tmp_path / "run", spec=few) as net:
            coordinator = net.up.coordinator
            for log in coordinator.logs.values():
                log.ask_head_with(answering(coordinator, None, log))
            await joined(net, Swarm(), FIRST)  # as many peers as the run begins with
            assert all(log.replica.opened is None for log in coordinator.logs.values())

    kit.run(main())


def test_each_module_has_entries_of_its_own(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        one, other = Swarm(), Swarm()
        async with kit.net(tmp_path / "run", spec=STAGED) as net:
            first, second = await begun(net, one, other)
            assert await publish(net, first, one, FIRST)
            assert await publish(net, first, one, FIRST)
            assert await publish(net, second, other, SECOND)
            status = net.up.coordinator.status()
            assert [(m.name, m.position) for m in status.modules] == [(FIRST, 2), (SECOND, 1)]
            assert status.position == 1
            assert status.params == 2 * kit.LAYOUT.numel
            assert status.modules[0].chain != status.modules[1].chain
            assert {p.module for p in status.peers} == {FIRST, SECOND}
        async with kit.net(tmp_path / "run", spec=STAGED) as net:
            positions = [log.head().position for log in net.up.coordinator.logs.values()]
            assert positions == [2, 1]

    kit.run(main())


def test_a_module_takes_no_entries_of_another(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        swarm = Swarm()
        async with kit.net(tmp_path / "run", spec=STAGED) as net:
            client, _ = await begun(net, swarm, Swarm())
            net.swarm = swarm
            head = net.up.coordinator.logs[FIRST].head()
            for run_id in (net.run_id, log_id(net.run_id, SECOND)):
                with pytest.raises(CoordinatorError, match="expected run"):
                    await net.publish(client, *swarm.entry(run_id, head))
            assert net.up.coordinator.logs[FIRST].head() == head
            assert net.up.coordinator.logs[SECOND].head().position == 0

    kit.run(main())


def test_newcomers_are_given_the_module_with_the_fewest_peers(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run", spec=STAGED) as net:
            found = []
            for _ in range(4):  # none of them has reported yet
                client = CoordinatorClient(net.up.invite, Identity.ephemeral())
                net.stack.push_async_callback(client.close)
                found.append((await client.join()).module)
                assert client.module == found[-1]
            assert found == [FIRST, SECOND, FIRST, SECOND]
            again = await client.join()
            assert again.module == SECOND
            chosen = CoordinatorClient(net.up.invite, Identity.ephemeral(), module=FIRST)
            net.stack.push_async_callback(chosen.close)
            assert (await chosen.join()).module == FIRST
            wrong = CoordinatorClient(net.up.invite, Identity.ephemeral(), module="stage-3")
            net.stack.push_async_callback(wrong.close)
            with pytest.raises(CoordinatorError, match="expected a module of 'stage-1', 'stage-2'"):
                await wrong.join()

    kit.run(main())


@pytest.mark.parametrize("reports", [False, True])
def test_newcomers_of_one_moment_spread_over_the_modules(
    kit: Any, tmp_path: Path, reports: bool
) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run", spec=STAGED) as net:
            found = Counter[str]()

            async def comes(role: Role, module: str = "") -> None:
                identity = Identity.ephemeral()
                client = CoordinatorClient(net.up.invite, identity, role=role, module=module)
                net.stack.push_async_callback(client.close)
                joined = await client.join()
                found[joined.module] += role == "trainer"
                if reports or role == "follower":
                    status = PeerStatus(
                        peer_id=identity.peer_id,
                        incarnation="1",
                        state="joining",
                        role=role,
                        module=joined.module,
                    )
                    await client.heartbeat(status)

            for _ in range(3):  # whoever only reads takes no trainer's place
                await comes("follower", FIRST)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(12):
                    tasks.create_task(comes("trainer"))
            assert found == {FIRST: 6, SECOND: 6}

    kit.run(main())


def test_epochs_and_snapshots_are_those_of_the_peers_module(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        one, other = Swarm(), Swarm()
        async with kit.net(tmp_path / "run", spec=STAGED) as net:
            client, stranger = await begun(net, one, other)
            logs = net.up.coordinator.logs
            names = {e.peer_id for e in logs[SECOND].replica.electorate}
            assert names == {identity.peer_id for identity in other.identities}
            net.swarm = one
            await publish(net, client, one, FIRST)
            assert (await client.heartbeat(one.status(0, module=FIRST))).head.position == 1
            assert (await stranger.heartbeat(other.status(0, module=SECOND))).head.position == 0
            snapshot = await stranger.fetch_snapshot(0)
            assert snapshot.root == logs[SECOND].replica.store.snapshot(0).root
            with pytest.raises(CoordinatorError, match="expected a module"):
                await client.heartbeat(one.status(0))

    kit.run(main())


def test_peers_that_join_and_never_report_are_forgotten(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run", spec=STAGED) as net:
            coordinator, now_s = net.up.coordinator, 1000.0
            coordinator._steady = lambda: now_s
            for number in range(MAX_PEERS + 100):  # each under a key of its own
                coordinator.place(f"peer-{number}", FIRST)
            assert len(coordinator._placed) == MAX_PEERS
            assert coordinator.place("newcomer", "").name == SECOND
            now_s += PLACED_S + 1
            coordinator.place("later", SECOND)
            assert list(coordinator._placed) == ["later"]
            assert coordinator.place("newcomer", "").name == FIRST
            assert coordinator.place("follower", "", trains=False).name == FIRST
            assert "follower" not in coordinator._placed  # it takes no trainer's place
        async with kit.net(tmp_path / "dense") as net:
            net.up.coordinator.place("peer", "")
            assert not net.up.coordinator._placed

    kit.run(main())


def test_no_log_waits_for_the_peers_of_another(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run", spec=STAGED) as net:
            first, second = net.up.coordinator.logs.values()
            has_ticked = asyncio.Event()

            async def waits(now_s: float) -> None:
                await has_ticked.wait()

            async def ticks(now_s: float) -> None:
                has_ticked.set()

            first.tick, second.tick = waits, ticks
            async with asyncio.timeout(10):
                await net.up.coordinator.tick()

    kit.run(main())
