"""C2: keys of one invite that send heartbeats, and do nothing else, are the electors of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.heads import PeerHead
from atoll.coordinator.policies import STALL_S
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import PeerStatus
from atoll.dht.identity import Identity
from atoll.optim.log.entry import Newcomer
from support import kit

LONG = RunSpec.from_dict(kit.SPEC.model_dump() | {"run": {"name": "test", "rounds": 20}})


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def ready(identity: Identity, **changes: Any) -> PeerStatus:
    values = {"peer_id": identity.peer_id, "incarnation": "1", "state": "ready"}
    return PeerStatus(**{**values, **changes})


async def joined(net: kit.Net, identity: Identity) -> CoordinatorClient:
    client = CoordinatorClient(net.up.invite, identity)
    net.stack.push_async_callback(client.close)
    await client.join()
    return client


def test_nine_keys_with_heartbeats_alone_open_no_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            keys = [Identity.ephemeral() for _ in range(9)]
            for key in keys:
                await (await joined(net, key)).heartbeat(ready(key))
            await net.up.coordinator.tick()
            assert net.up.coordinator.status().state == "waiting"
            await net.started()  # beside them, peers that answer
            named = {e.peer_id for e in net.up.coordinator.log.replica.electorate}
            assert named == {i.peer_id for i in net.swarm.identities}

    kit.run(main())


@pytest.mark.parametrize(
    "answers",
    [
        "another log",
        pytest.param("fits", marks=pytest.mark.exhaustive),
        pytest.param(None, marks=pytest.mark.exhaustive),
    ],
)
def test_a_later_epoch_is_for_those_in_the_log_or_with_a_log(
    tmp_path: Path, answers: str | None
) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            coordinator, clock = net.up.coordinator, Clock()
            coordinator._steady = clock
            one, *_ = await net.started()
            entry, body = net.swarm.entry(net.run_id, coordinator.log.head())
            assert await net.publish(one, entry, body)
            keys = [Identity.ephemeral() for _ in range(5)]
            fakes = [await joined(net, key) for key in keys]

            async def ask(peer_id: str) -> PeerHead | None:
                if not answers or peer_id != keys[0].peer_id:
                    return None
                return PeerHead(
                    peer_id=peer_id,
                    incarnation="1",
                    epoch=0,
                    position=1,
                    chain=coordinator.log.head().chain if answers == "fits" else b"x" * 32,
                    epoch_record=b"",
                )

            coordinator.log.ask_head_with(ask)

            async def stall(honest: bool) -> None:
                for _ in range(2 * int(STALL_S) + 5):
                    clock.now_s += 1.0
                    for key, client in zip(keys, fakes, strict=True):
                        await client.heartbeat(ready(key, state="training", position=1))
                    if honest:
                        await one.heartbeat(net.swarm.status(0, state="syncing", position=1))
                    await coordinator.tick()

            await stall(honest=True)
            assert coordinator.log.head().epoch >= 1
            (elector,) = coordinator.log.replica.electorate
            assert elector.peer_id == net.swarm.identities[0].peer_id
            opened = coordinator.log.head().epoch
            await stall(honest=False)  # nobody of the log is there
            await stall(honest=False)
            if answers != "fits":
                assert coordinator.log.head().epoch == opened
                return
            assert coordinator.log.head().epoch > opened
            (elector,) = coordinator.log.replica.electorate
            assert elector.peer_id == keys[0].peer_id

    kit.run(main())


def test_a_member_of_weight_0_is_elected_by_no_entry(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            coordinator = net.up.coordinator
            one, *_ = await net.started()
            entry, body = net.swarm.entry(net.run_id, coordinator.log.head())
            free = entry.members[0].model_copy(
                update={"peer_id": Identity.ephemeral().peer_id, "weight": 0.0}
            )
            entry = entry.model_copy(update={"members": (*entry.members, free)})
            assert await net.publish(one, entry, body)
            known = coordinator.log._epochs._in_newest_entries()
            assert known == {i.peer_id for i in net.swarm.identities}

    kit.run(main())


def test_keys_that_contributed_once_do_not_outvote_the_electors(tmp_path: Path) -> None:
    """Whoever stops a run for a minute had all of its keys made electors."""

    async def main() -> None:
        async with kit.net(tmp_path / "run", spec=LONG) as net:
            coordinator, clock = net.up.coordinator, Clock()
            coordinator._steady = clock
            clients = await net.started()
            keys = [Identity.ephemeral() for _ in range(9)]
            waiting = tuple(
                Newcomer(peer_id=key.peer_id, since=number, last=10, entries=8 if number < 3 else 7)
                for number, key in enumerate(keys)  # of these, three have been tried
            )
            for _ in range(11):
                entry, body = net.swarm.entry(net.run_id, coordinator.log.head())
                more = [
                    entry.members[0].model_copy(update={"peer_id": key.peer_id}) for key in keys
                ]
                members = (*entry.members, *more)
                entry = entry.model_copy(update={"members": members, "newcomers": waiting})
                assert await net.publish(clients[0], entry, body)
            fakes = [await joined(net, key) for key in keys]

            async def stall(honest: int) -> set[str]:
                before = coordinator.log.head().epoch
                for _ in range(int(STALL_S)):
                    clock.now_s += 5.0  # half of the silence allowed to a peer
                    for key, client in zip(keys, fakes, strict=True):
                        await client.heartbeat(ready(key, state="training", position=11))
                    for index, client in enumerate(clients[:honest]):
                        status = net.swarm.status(index, state="syncing", position=11)
                        await client.heartbeat(status)
                    await coordinator.tick()
                    if coordinator.log.head().epoch > before:
                        break
                return {e.peer_id for e in coordinator.log.replica.electorate}

            tried = [key.peer_id for key in keys[:3]]
            honest = [identity.peer_id for identity in net.swarm.identities]
            assert await stall(3) == {*honest, tried[0]}  # at most half as many as the present ones
            assert await stall(2) == {*honest[:2], tried[0], tried[1]}
            assert await stall(0) == {*tried[:2], tried[2]}  # no more than those that were tried

    kit.run(main())
