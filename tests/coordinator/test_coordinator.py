"""Epochs, divergence and silence: the coordinator's decisions under a clock of the test's own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.catching_up import LAG_S, STUCK_S
from atoll.coordinator.policies import STALL_S
from atoll.coordinator.presence import FORGET_S
from atoll.dht.identity import Identity
from atoll.optim.log.entry import Partial, leader_order
from atoll.peer.recovery.errors import NoWay

RUN = b"r" * 32


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_member_without_a_chunk_in_the_entry_is_left_out(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, *_ = await net.started()
            entry, body = net.swarm.entry(net.run_id, net.up.coordinator.log.head())
            nothing, some = Partial(member=0, cells=0), Partial(member=1, cells=1)
            part = entry.parts[0].model_copy(update={"partial": (nothing, some)})
            assert await net.publish(one, entry.model_copy(update={"parts": (part,)}), body)
            (row,) = net.up.coordinator.status().history
            assert (row.members, row.tokens) == (2, 200)
            assert row.left_out == [entry.members[0].peer_id]

    kit.run(main())


def test_a_run_that_stands_still_gets_a_new_epoch(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            clock = Clock()
            coordinator = net.up.coordinator
            coordinator._steady = clock
            one, *_ = await net.started()
            entry, body = net.swarm.entry(net.run_id, coordinator.log.head())
            await net.publish(one, entry, body)

            async def pass_time(seconds: float, alive: list[int]) -> None:
                for _ in range(int(seconds)):
                    clock.now_s += 1.0
                    for index in alive:
                        status = net.swarm.status(index, state="syncing", position=1)
                        await clients[index].heartbeat(status)
                    await coordinator.tick()

            clients = [one, net.client(1), net.client(2)]
            await clients[1].join()
            await pass_time(STALL_S - 2, [0])
            assert coordinator.log.head().epoch == 0
            await pass_time(5, [0])
            assert coordinator.log.head().epoch == 0  # one alone waits, and an epoch helps it not
            assert coordinator.status().state == "waiting"  # for a second trainer
            await pass_time(2, [0, 1])
            assert (coordinator.log.head().epoch, coordinator.log.head().position) == (1, 1)
            electors = {elector.peer_id for elector in coordinator.log.replica.electorate}
            assert electors == {identity.peer_id for identity in net.swarm.identities[:2]}
            await pass_time(100, [])
            assert coordinator.log.head().epoch == 1
            events = [e.text for e in coordinator.status().events]
            # One of the three came back for a moment.
            assert events.count("no report for 10 s; counts as gone") == 4

    kit.run(main())


def test_each_epoch_of_a_stalled_run_begins_with_another_leader(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            clock = Clock()
            coordinator = net.up.coordinator
            coordinator._steady = clock
            clients = await net.started()
            entry, body = net.swarm.entry(net.run_id, coordinator.log.head())
            await net.publish(clients[0], entry, body)
            replica = coordinator.log.replica

            async def until_epoch(number: int) -> str:
                while coordinator.log.head().epoch < number:
                    clock.now_s += 1.0
                    for index, client in enumerate(clients):
                        status = net.swarm.status(index, state="syncing", position=1)
                        await client.heartbeat(status)
                    await coordinator.tick()
                assert replica.position == 1 and len(replica.electorate) == len(clients)
                order = leader_order(replica.electorate, 1)
                return replica.electorate[order[replica.first_term]].peer_id

            first = replica.electorate[leader_order(replica.electorate, 1)[0]].peer_id
            assert replica.first_term == 0
            leaders = [first, await until_epoch(1), await until_epoch(2)]
            assert len(set(leaders)) == len(clients) == 3
            assert await until_epoch(3) == first  # all have failed: it begins anew

    kit.run(main())


@pytest.mark.parametrize(
    ("peers", "restarted", "waits_s"),
    [(3, 2, 0.0), (8, 5, STALL_S), pytest.param(3, 1, 3 * 300.0, marks=pytest.mark.exhaustive)],
)
def test_a_lost_quorum_waits_for_no_window(
    kit: Any, tmp_path: Path, peers: int, restarted: int, waits_s: float
) -> None:
    """Windows last 300 s; two restarts of three electors leave nobody who could decide."""

    async def main() -> None:
        swarm = kit.Swarm([Identity.ephemeral() for _ in range(peers)])
        async with kit.net(tmp_path / "run", swarm) as net:
            clock, coordinator = Clock(), net.up.coordinator
            coordinator._steady = clock
            clients = await net.started()
            tokens = coordinator.spec.step_tokens * coordinator.spec.outer.inner_steps
            began_s = clock.now_s
            while coordinator.log.head().epoch == 0:
                clock.now_s += 1.0
                for index, client in enumerate(clients):
                    status = net.swarm.status(
                        index,
                        state="syncing",
                        incarnation="2" if index < restarted else "1",
                        tokens_per_s=tokens / 300.0,
                    )
                    await client.heartbeat(status)
                await coordinator.tick()
            assert clock.now_s - began_s == pytest.approx(waits_s, abs=3)
            electors = coordinator.log.replica.electorate
            assert {e.incarnation for e in electors} <= {"1", "2"}

    kit.run(main())


@pytest.mark.parametrize("retired", [True, False])
def test_electors_that_leave_without_a_quorum_bring_a_new_epoch(
    kit: Any, tmp_path: Path, retired: bool
) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            coordinator, swarm = net.up.coordinator, net.swarm
            clients = await net.started()
            entry, body = swarm.entry(net.run_id, coordinator.log.head())
            assert await net.publish(clients[0], entry, body)
            assert coordinator.log.replica.electorate == swarm.electors()
            for index in (0, 1):
                await coordinator.tick()
                assert coordinator.log.head().epoch == 0  # two of three may go on
                status = swarm.status(index, state="leaving", position=1)
                await clients[index].heartbeat(status, leaving=True, retired=retired)
            await coordinator.tick()
            head = coordinator.log.head()
            assert (head.epoch, head.position) == (int(retired), 1)
            if retired:
                assert coordinator.log.replica.electorate == swarm.electors()[2:]
                assert coordinator.status().state == "waiting"  # for a second trainer
                texts = [event.text for event in coordinator.status().events]
                assert "epoch 1 opened at position 1 with 1 peer: acceptors left" in texts
                await coordinator.tick()
                assert coordinator.log.head().epoch == 1

    kit.run(main())


def test_an_elector_that_left_beyond_the_head_may_have_voted_at_it(
    kit: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            coordinator, swarm = net.up.coordinator, net.swarm
            clients = await net.started()
            entry, body = swarm.entry(net.run_id, coordinator.log.head())
            for index in (0, 1):
                status = swarm.status(index, state="leaving", position=1)
                await clients[index].heartbeat(status, leaving=True, retired=True)
            await coordinator.tick()
            assert coordinator.log.head().epoch == 0  # the entry that they voted for is not here
            assert await net.publish(clients[2], entry, body)
            await coordinator.tick()
            head = coordinator.log.head()
            assert (head.epoch, head.position) == (1, 1)

    kit.run(main())


def test_a_run_resumes_with_a_peer_that_comes_back(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            coordinator, swarm = net.up.coordinator, net.swarm
            clients = await net.started()
            for index, client in enumerate(clients):
                status = swarm.status(index, state="leaving")
                await client.heartbeat(status, leaving=True, retired=True)
            await coordinator.tick()
            assert coordinator.log.head().epoch == 0  # nobody is there
            back = swarm.status(1, incarnation="2", state="training")
            await clients[1].heartbeat(back)
            await coordinator.tick()
            assert coordinator.log.head().epoch == 1
            (elector,) = coordinator.log.replica.electorate
            assert (elector.peer_id, elector.incarnation) == (back.peer_id, "2")

    kit.run(main())


def test_a_goodbye_counts_only_in_the_epoch_in_which_it_was_said(kit: Any, tmp_path: Path) -> None:
    """A peer that takes it back is elected, and must not open an epoch at every look."""

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            coordinator, swarm = net.up.coordinator, net.swarm
            clients = await net.started()
            for index, client in enumerate(clients):
                status = swarm.status(index, state="leaving")
                await client.heartbeat(status, leaving=True, retired=True)
            await clients[1].heartbeat(swarm.status(1, state="training"))
            await coordinator.tick()
            assert coordinator.log.head().epoch == 1
            for _ in range(3):
                await coordinator.tick()
            assert coordinator.log.head().epoch == 1

    kit.run(main())


def test_no_epoch_voids_what_most_peers_hold(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            coordinator, clock = net.up.coordinator, Clock()
            coordinator._steady = clock
            one, two, _ = await net.started()
            entry, body = net.swarm.entry(net.run_id, coordinator.log.head())
            assert await net.publish(one, entry, body)

            async def stand_still(positions: tuple[int, int]) -> None:
                for _ in range(int(STALL_S) + 5):
                    clock.now_s += 1.0
                    for index, client in enumerate((one, two)):
                        status = net.swarm.status(index, state="syncing", position=positions[index])
                        await client.heartbeat(status)
                    await coordinator.tick()

            await stand_still((9, 9))
            assert coordinator.log.head().epoch == 0 and coordinator.status().state == "stalled"
            texts = [event.text for event in coordinator.status().events]
            behind = "8 rounds are missing here; a new epoch opens once they are fetched"
            assert sum(behind in text for text in texts) == 1
            await stand_still((9, 1))  # one of two says so
            assert coordinator.log.head().epoch == 1

    kit.run(main())


def test_rounds_that_nobody_can_show_the_way_to_are_given_up(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            coordinator, clock = net.up.coordinator, Clock()
            coordinator._steady = clock
            one, two, _ = await net.started()
            entry, body = net.swarm.entry(net.run_id, coordinator.log.head())
            assert await net.publish(one, entry, body)

            async def nobody_has_it(*_: object) -> None:
                raise NoWay("no peer has a snapshot with a certified root")

            catching_up = coordinator.log.recover_with(nobody_has_it)

            async def stand_still(seconds: float) -> None:
                for _ in range(int(seconds)):
                    clock.now_s += 1.0
                    for index, client in enumerate((one, two)):
                        status = net.swarm.status(index, state="syncing", position=9)
                        await client.heartbeat(status)
                    await coordinator.tick()

            await stand_still(STUCK_S)
            assert coordinator.log.head().epoch == 0  # one that has it may be on its way
            await stand_still(LAG_S + 2)
            assert (coordinator.log.head().epoch, coordinator.log.head().position) == (1, 1)
            texts = [event.text for event in coordinator.status().events]
            assert sum("8 rounds are void" in text for text in texts) == 1
            await catching_up.close()

    kit.run(main())


def test_a_joiner_that_finds_no_state_ends_the_wait_of_a_lone_trainer(
    kit: Any, tmp_path: Path
) -> None:
    """Only an epoch may lead the joiner to a state: the entries beyond its base are void then."""

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            coordinator, clock = net.up.coordinator, Clock()
            coordinator._steady = clock
            one, two, _ = await net.started()
            entry, body = net.swarm.entry(net.run_id, coordinator.log.head())
            assert await net.publish(one, entry, body)
            for _ in range(int(STALL_S) + 5):
                clock.now_s += 1.0
                status = net.swarm.status(0, state="syncing", position=1)
                await one.heartbeat(status)
                await two.heartbeat(net.swarm.status(1, state="joining", position=0))
                await coordinator.tick()
            assert coordinator.log.head().epoch == 1

    kit.run(main())


def test_long_windows_are_no_stall(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            coordinator, clock = net.up.coordinator, Clock()
            coordinator._steady = clock
            one, two, *_ = await net.started()
            inner, spec = coordinator.spec.inner, coordinator.spec
            tokens = inner.batch_size * inner.grad_accumulation * spec.data.seq_len
            speed = tokens * spec.outer.inner_steps / 100.0  # a window takes 100 s
            statuses = [
                net.swarm.status(index, state="training", tokens_per_s=speed) for index in (0, 1)
            ]
            began_s = clock.now_s
            for after_s, epoch in ((295.0, 0), (310.0, 1)):
                while clock.now_s < began_s + after_s:
                    clock.now_s += 5.0
                    for client, status in zip((one, two), statuses, strict=True):
                        await client.heartbeat(status)
                    await coordinator.tick()
                assert coordinator.log.head().epoch == epoch
                assert coordinator.status().state == ("stalled" if epoch else "training")

    kit.run(main())


def test_a_restarted_peer_is_logged_and_votes_in_the_next_epoch(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            clock, coordinator = Clock(), net.up.coordinator
            coordinator._steady = clock
            one, two, _ = await net.started()
            while coordinator.log.head().epoch == 0 and clock.now_s < 1000.0 + 10 * STALL_S:
                clock.now_s += 1.0
                await one.heartbeat(net.swarm.status(0, incarnation="2"))
                await two.heartbeat(net.swarm.status(1))
                await coordinator.tick()
            electors = coordinator.log.replica.electorate
            assert "2" in {elector.incarnation for elector in electors}
            texts = [event.text for event in (await one.status()).events]
            assert "restarted" in texts

    kit.run(main())


def test_a_peer_that_was_forgotten_does_not_come_back_with_a_restart(
    kit: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        swarm = kit.Swarm()
        async with kit.net(tmp_path / "run", swarm) as net:
            one, *_ = await net.started()
            coordinator, clock = net.up.coordinator, Clock()
            clock.now_s = coordinator._steady() + 2 * FORGET_S
            coordinator._steady = clock
            await one.heartbeat(swarm.status(0))
            await coordinator.tick()
        async with kit.net(tmp_path / "run", swarm) as net:
            (peer,) = net.up.coordinator.status().peers
            assert peer.peer_id == swarm.identities[0].peer_id

    kit.run(main())


def test_admissions_are_renewed_at_half_time(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one = net.client(0)
            first = (await one.join()).admission
            coordinator = net.up.coordinator
            assert (await one.heartbeat(net.swarm.status(0))).admission == b""
            offset_s = coordinator.spec.coordinator.admission_hours * 3600 * 0.6
            clock = coordinator._clock
            coordinator._clock = lambda: clock() + offset_s
            renewed = (await one.heartbeat(net.swarm.status(0))).admission
            assert renewed and renewed != first
            assert abs(one.clock_offset_s - offset_s) < 5

    kit.run(main())


def test_an_open_run_needs_no_token(kit: Any, tmp_path: Path) -> None:
    from atoll.coordinator.run.spec import RunSpec

    fields = kit.SPEC.model_dump()
    fields["coordinator"]["invite_only"] = False

    async def main() -> None:
        async with kit.net(tmp_path / "run", spec=RunSpec.from_dict(fields)) as net:
            assert net.up.invite.token == b""
            await net.client(0).join()

    kit.run(main())


def test_two_publishers_of_one_entry(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, two, _ = await net.started()
            entry, body = net.swarm.entry(net.run_id, net.up.coordinator.log.head())
            both = await asyncio.gather(
                net.publish(one, entry, body), net.publish(two, entry, body)
            )
            assert sorted(both) == [False, True]
            assert net.up.coordinator.log.head().position == 1

    kit.run(main())
