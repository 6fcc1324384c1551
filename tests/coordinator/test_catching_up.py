"""A coordinator that was away for longer than its peers keep the bodies of updates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.catching_up import AT_ONCE, LAG_S, STUCK_S, CatchUp, Lag, Taken
from atoll.coordinator.rpc.client_errors import NotThere
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.run.status import Gap
from atoll.dht import verify
from atoll.dht.identity import Identity
from atoll.dht.testing.memory import run_virtual
from atoll.dht.testing.virtualtime import inline
from atoll.optim.log.entry import Entry
from atoll.optim.log.live_replica import LiveReplica, OnTaken, RecoveryError
from atoll.optim.log.replica import Replica
from atoll.optim.log.store import LogStore
from atoll.peer.recovery import recovery
from atoll.peer.recovery.errors import NoDonor, NoWay
from atoll.peer.recovery.ledger import LedgerRecovery
from atoll.peer.rounds.messages import Decided
from support import swarm as in_memory
from support.donors import recovering
from support.logs import Log, LogSource


@pytest.fixture
def long_log(kit: Any, tmp_path: Path) -> Iterator[Log]:
    """One of nine entries, of which the replica `away` has three."""
    log = Log(tmp_path, swarm=kit.Swarm(), keys=RunKeys.generate())
    log.away = log.open("away")
    log.away.adopt(log.whole.epoch_record)
    log.grow(3)
    for claim, body in log.entries:
        log.away.accept(claim, body)
    log.grow(6)
    yield log
    log.whole.store.close()
    log.away.store.close()


def test_when_a_replica_counts_as_left_behind() -> None:
    lag = Lag()
    assert not lag.is_due(5, 9, 1000.0)
    assert not lag.is_due(6, 9, 1000.0 + LAG_S)  # it moves
    assert not lag.is_due(6, 9, 999.0 + 2 * LAG_S)
    assert lag.is_due(6, 9, 1000.0 + 2 * LAG_S)
    assert not lag.is_due(6, 9, 1001.0 + 2 * LAG_S)  # one look at a time
    assert lag.is_due(6, 9, 1000.0 + 3 * LAG_S)
    assert not lag.is_due(6, 6, 1000.0 + 9 * LAG_S)  # nobody is ahead


class Liar(LogSource):
    """Sends a log with an entry that nobody certified."""

    async def headers(self, start: int, stop: int) -> list[Decided]:
        sent = await super().headers(start, stop)
        entry = Entry.decode(sent[1].entry).model_copy(update={"lr": 0.0})
        return [sent[0], Decided(entry=entry.encode(), certificate=sent[1].certificate), *sent[2:]]


def test_donors_that_lie_are_reported_and_it_looks_again(long_log: Log) -> None:
    told: list[tuple[str, str]] = []
    taken: list[Taken] = []
    liar = Liar(long_log, name="liar00", first_body=9, snapshots=())
    honest = LogSource(long_log, name="12D3KooWdonor1", first_body=6, snapshots=(6,))
    tries = [recovering(liar), recovering(liar), recovering(liar, honest)]

    async def main() -> None:
        replica = LiveReplica(long_log.away, compute=asyncio.to_thread)
        catching_up = CatchUp(
            replica,
            lambda replica, on_taken: tries.pop(0)(replica, on_taken),
            on_taken=taken.extend,
            report=lambda level, text: told.append((level, text)),
            turns=asyncio.Semaphore(AT_ONCE),
        )
        catching_up.look(9, 0.0)
        for looks in (1, 2, 3):
            catching_up.look(9, looks * LAG_S)
            await catching_up._task
            assert replica.position == (3 if looks < 3 else 9)
        catching_up.look(9, 4 * LAG_S)  # nobody is ahead any more
        await catching_up.close()

    asyncio.run(asyncio.wait_for(main(), 30.0))
    assert told == [
        (
            "warning",
            "catching up failed, retrying: no valid entries from 1 donors",
        ),
        (
            "warning",
            "caught up from round 3 to 9 by the snapshot after round 6 and entries of donor1; "
            "no peer has kept the updates of rounds 4 to 6",
        ),
    ]
    assert [(each.entry.position, each.has_body) for each in taken] == [
        (position, position >= 6) for position in range(3, 9)
    ]
    assert all(each.electorate == long_log.swarm.electors() for each in taken)
    assert long_log.away.is_current and long_log.away.head == long_log.whole.head
    assert long_log.away.state.root() == long_log.whole.state.root()


def test_entries_that_came_before_a_recovery_failed_are_noted(long_log: Log) -> None:
    taken: list[Taken] = []
    told: list[str] = []

    async def fails(replica: LiveReplica, on_taken: Callable[[int], None]) -> None:
        await replica.install(long_log.states[6], long_log.claims(), on_taken)
        raise RecoveryError("no peer has the body of entry 6")

    async def main() -> None:
        catching_up = CatchUp(
            LiveReplica(long_log.away, compute=asyncio.to_thread),
            fails,
            on_taken=taken.extend,
            report=lambda level, text: told.append(text),
            turns=asyncio.Semaphore(AT_ONCE),
        )
        catching_up.look(9, 0.0)
        catching_up.look(9, LAG_S)
        await catching_up._task
        await catching_up.close()

    asyncio.run(asyncio.wait_for(main(), 30.0))
    assert [each.entry.position for each in taken] == [3, 4, 5]
    assert told == ["catching up failed, retrying: no peer has the body of entry 6"]


def test_logs_that_stay_behind_recover_few_at_a_time(long_log: Log) -> None:
    """Each holds bodies meanwhile; one whose donor is slow holds up no other."""
    begun: list[int] = []

    async def main() -> None:
        turns, may_end = asyncio.Semaphore(AT_ONCE), [asyncio.Event() for _ in range(4)]
        replica = LiveReplica(long_log.away, compute=asyncio.to_thread)

        def of(number: int) -> CatchUp:
            async def recover(replica: LiveReplica, on_taken: OnTaken) -> None:
                begun.append(number)
                await may_end[number].wait()

            return CatchUp(
                replica,
                recover,
                on_taken=lambda taken: None,
                report=lambda level, text: None,
                turns=turns,
            )

        logs = [of(number) for number in range(len(may_end))]
        for now_s in (0.0, LAG_S):
            for each in logs:
                each.look(9, now_s)
        for _ in range(100):
            await asyncio.sleep(0)
        assert begun == list(range(AT_ONCE))
        for event in may_end[1:]:  # all but the first, which stays
            event.set()
        await asyncio.gather(*(each._task for each in logs[1:] if each._task is not None))
        assert sorted(begun) == [0, 1, 2, 3]
        may_end[0].set()
        for each in logs:
            await each.close()

    asyncio.run(asyncio.wait_for(main(), 30.0))


def watched(replica: Replica, recover: Callable[..., Awaitable[Any]], told: list[str]) -> CatchUp:
    """What watches a replica; what it reports goes to `told`."""
    return CatchUp(
        LiveReplica(replica, compute=asyncio.to_thread),
        recover,
        on_taken=lambda taken: None,
        report=lambda level, text: told.append(text),
        turns=asyncio.Semaphore(AT_ONCE),
    )


def test_an_update_that_rots_while_the_log_is_in_use_comes_back(long_log: Log) -> None:
    whole, told = long_log.whole, list[str]()
    donor = LogSource(long_log, name="donor", first_body=6, snapshots=())

    async def main() -> None:
        catching_up = watched(whole, recovering(donor), told)
        catching_up.look(9, 0.0)
        whole.store.drop_damaged(7, long_log.entries[7][0].entry.encode())
        catching_up.look(9, 1.0)
        assert whole.store.gaps() == [(7, 8)]
        catching_up.look(9, 1.0 + LAG_S)
        await catching_up._task
        await catching_up.close()

    asyncio.run(asyncio.wait_for(main(), 30.0))
    assert whole.store.gaps() == [] and whole.store.body(7) == long_log.entries[7][1]
    assert "dropped the updates of rounds 8" in told[0]
    assert told[1:] == ["damaged records recovered from peers"]


def test_one_that_nobody_has_is_bridged_by_the_state_at_the_head(long_log: Log) -> None:
    whole = long_log.whole
    donor = LogSource(long_log, name="donor", first_body=9, snapshots=())

    async def main() -> None:
        catching_up = watched(whole, recovering(donor), [])
        catching_up.look(9, 0.0)
        whole.store.drop_damaged(8, long_log.entries[8][0].entry.encode())
        catching_up.look(9, LAG_S)
        await catching_up._task
        await catching_up.close()

    asyncio.run(asyncio.wait_for(main(), 30.0))
    assert whole.store.gaps() == [(8, 9)] and whole.store.snapshot_positions()[-1] == 9


def test_it_is_stuck_once_peers_have_long_had_no_way(long_log: Log) -> None:
    answers = [*(NoWay("nobody has it") for _ in range(3)), NoDonor("a line broke")]

    async def fails(replica: LiveReplica, on_taken: Callable[[int], None]) -> None:
        raise answers.pop(0)

    async def main() -> None:
        catching_up = watched(long_log.away, fails, [])

        async def look(now_s: float) -> None:
            catching_up.look(9, now_s)
            if catching_up._task is not None:
                await catching_up._task

        await look(0.0)
        await look(10.0)
        assert not catching_up.is_stuck(9.0 + STUCK_S) and catching_up.is_stuck(10.0 + STUCK_S)
        await look(20.0)
        assert catching_up.is_stuck(10.0 + STUCK_S)
        catching_up.look(3, 21.0)
        assert not catching_up.is_stuck(10.0 + STUCK_S)  # those have gone, and others may come
        await look(26.0)
        assert catching_up.is_stuck(26.0 + STUCK_S)
        await look(36.0)
        assert not catching_up.is_stuck(10.0 + STUCK_S)  # it was the line: one may have it
        await catching_up.close()

    asyncio.run(asyncio.wait_for(main(), 30.0))


def test_a_ledger_that_diverged_stores_what_nobody_publishes(long_log: Log) -> None:
    away = long_log.away
    away.standing = replace(away.standing, diverged="by a fault")
    donor = LogSource(long_log, name="donor", first_body=6, snapshots=(6,))

    async def main() -> None:
        replica = LiveReplica(away, compute=asyncio.to_thread)
        assert await recovering(donor)(replica, lambda position: None) is not None
        assert await recovering(donor)(replica, lambda position: None) is None

    asyncio.run(asyncio.wait_for(main(), 30.0))
    assert away.head == long_log.whole.head and away.state.position == 3
    assert away.store.gaps() == [(3, 6)]


def test_a_snapshot_before_its_own_state_is_not_fetched(long_log: Log) -> None:
    asked: list[int] = []

    class Donor(LogSource):
        async def leaf_digests(self, position: int, count: int) -> list[bytes]:
            asked.append(position)
            return await super().leaf_digests(position, count)

    donor = Donor(long_log, name="donor", first_body=9, snapshots=(2,))

    async def main() -> None:
        replica = LiveReplica(long_log.away, compute=asyncio.to_thread)
        with pytest.raises(RecoveryError):
            await recovering(donor)(replica, lambda position: None)

    asyncio.run(asyncio.wait_for(main(), 30.0))
    assert asked == [] and long_log.away.state.position == 3


def test_a_change_is_completed_when_its_caller_is_cancelled(long_log: Log) -> None:
    """A thread cannot be stopped: its lock given back, the next change would run beside it."""
    hold, begun = threading.Event(), threading.Event()

    async def main() -> None:
        replica = LiveReplica(long_log.away, compute=asyncio.to_thread)
        heard: list[int] = []
        replica.listeners.append(lambda applied: heard.append(applied.entry.position))
        append = replica.store.append

        def held(**record: Any) -> bool:
            begun.set()
            assert hold.wait(20.0)
            return append(**record)

        replica.store.append = held
        first = asyncio.create_task(replica.accept_claim(*long_log.entries[3]))
        await asyncio.to_thread(begun.wait, 20.0)
        first.cancel()
        second = asyncio.create_task(replica.accept_claim(*long_log.entries[4]))
        await asyncio.sleep(0)
        assert replica.position == 3
        hold.set()
        assert await second
        assert first.cancelled() and heard == [3, 4] and replica.position == 5

    try:
        asyncio.run(asyncio.wait_for(main(), 30.0))
    finally:
        hold.set()


def test_a_coordinator_reports_the_updates_it_lacks(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, *_ = await net.started()
            coordinator = net.up.coordinator
            log = Log(tmp_path, swarm=net.swarm, keys=coordinator.keys, run_id=net.run_id)
            assert log.whole.epoch_record == coordinator.log.replica.epoch_record
            log.grow(7)
            claim, body = log.entries[0]
            assert await net.publish(one, claim.entry, body)
            donor = LogSource(log, name="donor", first_body=4, snapshots=(4,))
            catching_up = coordinator.log.recover_with(recovering(donor))
            await one.heartbeat(net.swarm.status(0, position=7))
            now_s = coordinator._steady()
            for later_s in (0.0, LAG_S):
                catching_up.look(coordinator.log._claimed(now_s), now_s + later_s)
            while coordinator.log.head().position < 7 or not coordinator.log.replica.is_current:
                await asyncio.sleep(0.01)
            await catching_up.close()
            status = await one.status()
            assert status.gaps == [Gap(first=2, last=4)]
            assert [row.position for row in status.history] == [1, 2, 3, 4, 5, 6, 7]
            assert status.tokens_total == 2100 and status.state == "finished"
            assert (await one.fetch_snapshot()).first_body == 4
            got = [each.position async for each in one.fetch_entries(4, 9)]
            assert got == [4, 5, 6]
            with pytest.raises(NotThere, match="the body of entry 1 is not here"):
                await one.fetch_body(1, 0, memoryview(bytearray(1)))
            assert len([_ async for _ in one.fetch_entries(0, 9)]) == 7
            log.whole.store.close()
        async with kit.net(tmp_path / "run", net.swarm) as net:
            again = net.up.coordinator.status()
            assert (again.gaps, again.history) == (status.gaps, status.history)
            texts = [event.text for event in again.events]
            assert texts.count("run complete: all 6 rounds committed") == 1
            assert net.up.coordinator.last_checkpoint().name == "test-00000007.safetensors"

    kit.run(main())


def test_entries_that_come_while_it_installs_are_not_waited_for(kit: Any, tmp_path: Path) -> None:
    hold, begun = threading.Event(), threading.Event()

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, *_ = await net.started()
            coordinator = net.up.coordinator
            log = Log(tmp_path, swarm=net.swarm, keys=coordinator.keys, run_id=net.run_id)
            log.grow(5)
            save = coordinator.log.replica.store.save_snapshot

            def held(*arguments: Any) -> Any:
                begun.set()
                assert hold.wait(20.0)
                return save(*arguments)

            coordinator.log.replica.store.save_snapshot = held
            donor = LogSource(log, name="donor", first_body=2, snapshots=(2,))
            catching_up = coordinator.log.recover_with(recovering(donor))
            catching_up.look(5, 0.0)
            catching_up.look(5, LAG_S)
            assert await asyncio.to_thread(begun.wait, 20.0)
            claim, body = log.entries[0]
            assert not await net.publish(one, claim.entry, body)
            assert net.up.coordinator.log.head().position == 0
            hold.set()
            await catching_up._task
            assert net.up.coordinator.log.head().position == 5
            log.whole.store.close()

    try:
        kit.run(main())
    finally:
        hold.set()


# With peers that train, in memory


def ledger_recovery(swarm: in_memory.Swarm) -> LedgerRecovery:
    me = Identity.ephemeral().peer_id
    return LedgerRecovery(
        me=me, transport=swarm.network.transport(me), roster=swarm.board.roster(me)
    )


async def publish(peer: Any, replica: LiveReplica) -> None:
    """Publish entries to the coordinator as a peer does, as long as it has them."""
    store = peer.replica.store
    for position in range(replica.position, peer.replica.position):
        record = store.get(position)
        claim = await replica.claim(record.entry, record.certificate)
        assert await replica.accept_claim(claim, store.body(position))


def in_a_swarm(
    tmp_path: Path, main: Callable[[in_memory.Swarm, LiveReplica], Awaitable[None]], **options: Any
) -> None:
    async def run() -> None:
        swarm = in_memory.Swarm(tmp_path / "peers", **options)
        store = LogStore(tmp_path / "log", run_id=in_memory.RUN_ID, genesis_chain=swarm.chain)
        store.save_snapshot(in_memory.genesis(swarm.replay), swarm.chain)
        core = Replica(
            swarm.module, store, verify=verify, verify_run=in_memory.verify_run, is_ledger=True
        )
        core.resume()
        replica = LiveReplica(core, compute=inline)
        try:
            peers = [swarm.add() for _ in range(3)]
            electorate = [peer.ctx.me for peer in peers]
            await replica.open_epoch(electorate, in_memory.ORGANISER.sign)
            for peer in peers:
                await peer.start(replica.epoch_record)
            await main(swarm, replica)
        finally:
            await swarm.stop()
            await replica.close()

    run_virtual(run())


@pytest.mark.parametrize("span", [2, recovery.MAX_SPAN])
def test_it_comes_back_to_peers_that_have_pruned_what_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, span: int
) -> None:
    monkeypatch.setattr(recovery, "MAX_SPAN", span)

    async def main(swarm: in_memory.Swarm, replica: LiveReplica) -> None:
        one = swarm.peers[0]
        await swarm.until(lambda: one.replica.position == 3)
        await publish(one, replica)
        await swarm.until(lambda: one.replica.position == 15)
        first = min(peer.replica.store.first_with_bodies() for peer in swarm.peers)
        assert first > 3
        taken: list[int] = []
        recovered = await ledger_recovery(swarm)(replica, taken.append)
        assert recovered is not None and set(recovered.donors) <= {
            peer.identity.peer_id for peer in swarm.peers
        }
        assert taken == list(range(3, replica.position))
        assert replica.is_current and replica.head.position >= 15
        assert replica.store.gaps() == [(3, first)]
        await swarm.until(lambda: one.replica.position == replica.head.position + 2)
        await publish(one, replica)
        assert replica.head.chain == one.replica.chain
        assert replica.state.root() == one.replica.state.root()

    in_a_swarm(tmp_path, main, body_budget_bytes=0)


def test_what_a_peer_can_publish_is_not_fetched(tmp_path: Path) -> None:
    async def main(swarm: in_memory.Swarm, replica: LiveReplica) -> None:
        one, recover = swarm.peers[0], ledger_recovery(swarm)
        await swarm.until(lambda: one.replica.position == 5)
        assert await recover(replica, print) is None
        await publish(one, replica)
        assert await recover(replica, print) is None
        assert replica.store.gaps() == []

    in_a_swarm(tmp_path, main)


def test_epochs_of_others_are_not_adopted(tmp_path: Path) -> None:
    """The coordinator signs them all: a newer one is its own, from a state that it has lost."""

    async def main(swarm: in_memory.Swarm, replica: LiveReplica) -> None:
        one = swarm.peers[0]
        await swarm.until(lambda: one.replica.position == 3)
        record = in_memory.signed_epoch(7, 2, one.replica.chain, [one.ctx.me])
        await one.replica.adopt(record)
        assert await ledger_recovery(swarm)(replica, print) is None
        assert (replica.epoch, replica.position) == (0, 0)

    in_a_swarm(tmp_path, main)
