"""C2: keys of one invite that send heartbeats, and do nothing else, are the electors of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.heads import AGAIN_S, FRESH_S, Heads, PeerHead
from atoll.coordinator.policies import STALL_S
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.run.status import PeerStatus
from atoll.dht.identity import Identity
from support import kit


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
            named = {e.peer_id for e in net.up.coordinator.replica.electorate}
            assert named == {i.peer_id for i in net.swarm.identities}

    kit.run(main())


@pytest.mark.parametrize("answers", [None, "fits", "another log"])
def test_a_later_epoch_is_for_those_in_the_log_or_with_a_log(
    tmp_path: Path, answers: str | None
) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            coordinator, clock = net.up.coordinator, Clock()
            coordinator._steady = clock
            one, *_ = await net.started()
            entry, body = net.swarm.entry(net.run_id, coordinator.head())
            assert await net.publish(one, entry, body)
            keys = [Identity.ephemeral() for _ in range(5)]
            fakes = [await joined(net, key) for key in keys]

            async def ask(peer_ids: Sequence[str]) -> list[PeerHead]:
                chain = coordinator.head().chain if answers == "fits" else b"x" * 32
                return [
                    PeerHead(
                        peer_id=p,
                        incarnation="1",
                        epoch=0,
                        position=1,
                        chain=chain,
                        epoch_record=b"",
                    )
                    for p in peer_ids
                    if answers and p == keys[0].peer_id
                ]

            coordinator.ask_heads_with(ask)

            async def stall(honest: bool) -> None:
                for _ in range(2 * int(STALL_S) + 5):
                    clock.now_s += 1.0
                    for key, client in zip(keys, fakes, strict=True):
                        await client.heartbeat(ready(key, state="training", position=1))
                    if honest:
                        await one.heartbeat(net.swarm.status(0, state="syncing", position=1))
                    await coordinator.tick()

            await stall(honest=True)
            assert coordinator.head().epoch >= 1
            (elector,) = coordinator.replica.electorate
            assert elector.peer_id == net.swarm.identities[0].peer_id
            opened = coordinator.head().epoch
            await stall(honest=False)  # nobody of the log is there
            await stall(honest=False)
            if answers != "fits":
                assert coordinator.head().epoch == opened
                return
            assert coordinator.head().epoch > opened
            (elector,) = coordinator.replica.electorate
            assert elector.peer_id == keys[0].peer_id

    kit.run(main())


def test_a_member_of_weight_0_is_elected_by_no_entry(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            coordinator = net.up.coordinator
            one, *_ = await net.started()
            entry, body = net.swarm.entry(net.run_id, coordinator.head())
            free = entry.members[0].model_copy(
                update={"peer_id": Identity.ephemeral().peer_id, "weight": 0.0}
            )
            entry = entry.model_copy(update={"members": (*entry.members, free)})
            assert await net.publish(one, entry, body)
            known = coordinator._epochs._in_newest_entries()
            assert known == {i.peer_id for i in net.swarm.identities}

    kit.run(main())


def test_a_silent_peer_is_not_called_at_every_look() -> None:
    calls: list[list[str]] = []

    async def ask(peer_ids: Sequence[str]) -> list[PeerHead]:
        calls.append(list(peer_ids))
        return [
            PeerHead(
                peer_id=p, incarnation="1", epoch=0, position=0, chain=b"c" * 32, epoch_record=b""
            )
            for p in peer_ids
            if p == "here"
        ] + [
            PeerHead(
                peer_id="uninvited",
                incarnation="1",
                epoch=0,
                position=0,
                chain=b"c" * 32,
                epoch_record=b"",
            )
        ]

    async def main() -> None:
        heads = Heads(ask)
        for now_s in (0.0, 0.5, FRESH_S + AGAIN_S):
            answers = await heads.of(["here", "silent"], now_s)
            assert [head.peer_id for head in answers] == ["here"]
        assert calls == [["here", "silent"]] * 2

    kit.run(main())
