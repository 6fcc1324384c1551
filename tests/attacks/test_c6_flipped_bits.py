"""C6: flipped bits in the log on disk pass unnoticed at a start, or end the process."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.coordinator.catching_up import LAG_S
from atoll.coordinator.run.keys import KEYS_FILE, RunKeys
from atoll.optim.log.entry import Certificate, LogError, genesis_chain, verify_key
from atoll.optim.log.live_replica import LiveReplica
from atoll.optim.log.mending import mend
from atoll.optim.log.replica import Replica
from atoll.optim.log.store import LogStore
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon.log_run import CatchingUp, LogRun
from atoll.peer.recovery.recovery import Recovery
from atoll.peer.recovery.sources import Source
from support import kit
from support.donors import Clock, StoreSource, answering, recovering
from support.logs import RUN, Log, LogSource, flip, open_replica

NEWEST = "position = (SELECT max(position) FROM snapshots)"


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """One of nine entries, with snapshots each two."""
    log = Log(tmp_path, swarm=kit.Swarm(), keys=RunKeys.generate())
    log.grow(9)
    return log


@pytest.mark.parametrize(
    ("table", "column", "where", "left", "bodies"),
    [
        ("entries", "entry", "position = 3", 3, []),
        ("entries", "chain", "position = 8", 8, []),
        ("entries", "position", "position = 8", 8, []),
        ("entries", "body_bytes", "position = 2", 2, []),
        ("bodies", "data", "position = 1", 9, [1]),
        ("bodies", "data", "position = 8", 8, []),  # after the newest snapshot
        ("entries", "certificate", "position = 3", 9, []),
        ("snapshots", "layout", NEWEST, 9, []),
        ("snapshots", "chain", NEWEST, 9, []),
        ("epochs", "record", "epoch = 0", 9, []),
    ],
)
def test_the_digests_find_a_flipped_bit(
    log: Log, table: str, column: str, where: str, left: int, bodies: list[int]
) -> None:
    folder = log.folder / "whole"
    log.whole.store.close()
    verify_run = partial(verify_key, log.keys.run_public_key)

    def opened() -> LogStore:
        chain = genesis_chain(RUN, kit.genesis().root())
        return LogStore(folder, run_id=RUN, genesis_chain=chain)

    store = opened()
    assert not mend(store, verify_run=verify_run)  # nothing is dropped without cause
    store.close()
    flip(folder, table, column, where)
    store = opened()
    damage = mend(store, verify_run=verify_run)
    assert damage and "check the disk" in str(damage)
    assert store.head.position == left and damage.bodies == bodies
    assert store.gaps() == [(b, b + 1) for b in bodies]
    certificates = [3] if column == "certificate" else []
    assert damage.certificates == store.uncertified() == certificates
    if table == "snapshots":
        (dropped,) = damage.snapshots
        assert dropped > 0 and dropped not in store.snapshot_positions()
    if table == "epochs":
        assert damage.epochs == [0] and store.latest_epoch() is None
    assert not mend(store, verify_run=verify_run)
    store.close()
    replica = open_replica(folder, log.keys)
    assert replica.state.root() == log.states[replica.state.position].root()
    replica.store.close()


@pytest.mark.parametrize(
    "damaging",
    [
        lambda folder: flip(folder, "bodies", "data", "position = 1"),
        lambda folder: flip(folder, "entries", "entry", "position = 3"),
        lambda folder: flip(folder, "entries", "certificate", "position = 3"),
        lambda folder: flip(folder, "epochs", "record", "epoch = 0"),
    ],
    ids=["body", "entry", "certificate", "epoch"],
)
def test_a_coordinator_mends_its_log_from_donors(
    tmp_path: Path, damaging: Callable[[Path], None]
) -> None:
    async def main() -> None:
        folder, swarm, clock = tmp_path / "run", kit.Swarm(), Clock()
        async with kit.net(folder, swarm) as net:
            one, *_ = await net.started()
            for _ in range(5):
                entry, body = swarm.entry(net.run_id, net.up.coordinator.log.head())
                assert await net.publish(one, entry, body)
            before = net.up.coordinator.status()
        shutil.copytree(folder / "log", tmp_path / "donor")
        keys = RunKeys.load_or_create(folder / KEYS_FILE)
        donor: Replica = open_replica(tmp_path / "donor", keys, run_id=net.run_id)
        damaging(folder / "log")
        async with kit.net(folder, swarm) as net:
            coordinator = net.up.coordinator
            coordinator._steady = clock
            texts = [event.text for event in coordinator.status().events]
            assert sum("the log on disk is damaged" in text for text in texts) == 1
            one = net.client(0)
            await one.join()
            coordinator.log.ask_head_with(answering(swarm, donor))
            catching_up = coordinator.log.recover_with(recovering(StoreSource(donor)))
            for _ in range(int(4 * LAG_S)):
                clock.now_s += 1.0
                status = swarm.status(0, state="training", position=5)
                beat = await one.heartbeat(status)
                await coordinator.tick()
                if catching_up._task is not None:
                    await catching_up._task
                if beat.publish_from is not None:
                    record = donor.store.get(beat.publish_from)
                    assert record is not None
                    await one.publish(
                        epoch=record.epoch,
                        position=record.position,
                        entry=record.entry,
                        certificate=record.certificate,
                        body=donor.store.body(record.position),
                    )
            assert coordinator.log.head() == donor.head
            assert coordinator.log.replica.state.root() == donor.state.root()
            assert coordinator.log.replica.epoch_record == donor.epoch_record
            assert coordinator.log.replica.store.gaps() == [] == coordinator.status().gaps
            assert coordinator.log.replica.store.headers(0, 9) == donor.store.headers(0, 9)
            assert coordinator.status().tokens_total == before.tokens_total
            await catching_up.close()
        donor.store.close()

    kit.run(main())


@pytest.mark.parametrize("can_be_made", [True, False])
def test_a_first_state_that_has_rotted_is_made_again_or_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_be_made: bool
) -> None:
    async def main() -> None:
        folder, swarm = tmp_path / "run", kit.Swarm()
        async with kit.net(folder, swarm) as net:
            one, *_ = await net.started()
            for _ in range(2):
                entry, body = swarm.entry(net.run_id, net.up.coordinator.log.head())
                assert await net.publish(one, entry, body)
            await net.up.coordinator.log.replica.saved()
            root = net.up.coordinator.log.replica.state.root()
        first = folder / "log" / "snapshot-000000000000.bin"
        whole = first.read_bytes()
        first.write_bytes(b"rotten" + whole[6:])
        if not can_be_made:
            monkeypatch.setattr(
                kit, "genesis", lambda module: OuterState.genesis(kit.LAYOUT, other)
            )
        async with kit.net(folder, swarm) as net:
            replica = net.up.coordinator.log.replica
            assert (replica.position, replica.state.root()) == (2, root)
            (told,) = [e.text for e in net.up.coordinator.status().events if "damaged" in e.text]
            assert ("which is made again here" in told) == can_be_made
            assert (first.read_bytes() == whole) == can_be_made

    other = torch.full((kit.LAYOUT.numel,), 0.5)
    kit.run(main())


def test_a_log_of_an_earlier_version_is_checked_from_now_on(log: Log) -> None:
    folder, verify_run = log.folder / "whole", partial(verify_key, log.keys.run_public_key)
    chain = genesis_chain(RUN, kit.genesis().root())
    log.whole.store.close()
    with sqlite3.connect(folder / "log.sqlite") as db:
        db.execute("DROP TABLE checks")
        db.execute("UPDATE entries SET certificate = ? WHERE position = 2", (b"\xc1rubbish",))
    db.close()
    store = LogStore(folder, run_id=RUN, genesis_chain=chain)
    assert mend(store, verify_run=verify_run).certificates == [2]
    assert len(store.certificate_checks(0, 9)) == 9
    store.close()
    flip(folder, "entries", "certificate", "position = 5")
    store = LogStore(folder, run_id=RUN, genesis_chain=chain)
    assert mend(store, verify_run=verify_run).certificates == [5]
    assert store.uncertified() == [2, 5]
    store.close()


def test_a_certificate_comes_back_only_if_it_holds(log: Log) -> None:
    replica = log.whole
    (entry, certificate), (other, _) = log.records(3)[:2]
    replica.store.put_certificate(3, b"")
    stranger = Certificate(attempt=0, votes=log.swarm.certify(log.entries[4][0].entry).votes)
    for wrong in ((other, certificate), (entry, stranger.encode()), (entry, b"")):
        with pytest.raises(LogError):
            replica.add_certificate(3, *wrong)
        assert replica.store.uncertified() == [3]
    replica.add_certificate(3, entry, certificate)
    assert replica.store.uncertified() == []


def test_a_damaged_entry_is_served_by_nobody(tmp_path: Path) -> None:
    """A joiner would take its donor for a liar."""

    async def main() -> None:
        folder, swarm = tmp_path / "run", kit.Swarm()
        async with kit.net(folder, swarm) as net:
            one, *_ = await net.started()
            for _ in range(5):
                entry, body = swarm.entry(net.run_id, net.up.coordinator.log.head())
                assert await net.publish(one, entry, body)
        flip(folder / "log", "entries", "certificate", "position = 3")
        async with kit.net(folder, swarm) as net:
            client = net.client(0)
            await client.join()
            assert [each.position async for each in client.fetch_entries(0, 5)] == [0, 1, 2]
            assert [each.position async for each in client.fetch_entries(4, 1)] == [4]

    kit.run(main())


@pytest.mark.parametrize(
    ("table", "column", "where"),
    [
        ("entries", "entry", "position = 3"),
        ("bodies", "data", "position = 8"),
        ("entries", "certificate", "position = 7"),
        ("snapshots", "chain", NEWEST),
        ("epochs", "record", "epoch = 0"),
    ],
)
def test_a_peer_mends_its_log_at_a_start_and_goes_on(
    log: Log, table: str, column: str, where: str
) -> None:
    peer = log.open("peer", is_ledger=False)
    peer.adopt(log.whole.epoch_record)
    for claim, body in log.entries:
        peer.accept(claim, body)
    peer.store.write_bodies()
    peer.store.close()
    flip(log.folder / "peer", table, column, where)
    told: list[str] = []

    async def main() -> None:
        core = open_replica(log.folder / "peer", log.keys, is_ledger=False, resumes=False)
        run = peer_run(log, core, told)
        joined = types.SimpleNamespace(head=log.whole.head, epoch=log.whole.epoch_record)
        async with asyncio.timeout(20):
            await LogRun._settle(run, joined)
        assert run.replica.head == log.whole.head
        assert run.replica.state.root() == log.whole.state.root()
        assert run.replica.electorate == log.whole.electorate
        certified = [(row.entry, row.certificate) for row in core.store.headers(0, 9)]
        assert certified == log.records()[-len(certified) :]
        assert sum("the log on disk is damaged" in text for text in told) == 1
        core.store.close()

    kit.run(main())


def peer_run(log: Log, core: Replica, told: list[str]) -> Any:
    """A `LogRun` whose peers all hold the whole log."""
    donor = LogSource(log, name="donor", first_body=0, snapshots=(4, 6))

    async def listed() -> Iterator[Sequence[Source]]:
        return iter([[donor]])

    async def compute(work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)

    async def nothing(*_: object) -> None:
        pass

    async def genesis() -> OuterState:
        return kit.genesis()

    def report(level: str, text: str, **_: object) -> None:
        told.append(text)

    replica = LiveReplica(core, compute=compute)
    ctx: Any = types.SimpleNamespace(replica=replica, on_event=report, now=time.monotonic)
    recovery = Recovery(
        replica,
        listed,
        genesis=genesis,
        stall_s=1.0,
        on_event=report,
        on_progress=lambda what, left: None,
    )
    catching_up = CatchingUp(ctx, recovery, on_recovered=lambda: None, on_leap=lambda: None)
    invite = types.SimpleNamespace(run_key=log.keys.run_public_key)
    return types.SimpleNamespace(
        _env=types.SimpleNamespace(
            options=types.SimpleNamespace(invite=invite),
            compute=compute,
            report=report,
            neighbours=types.SimpleNamespace(connect=nothing),
        ),
        publish=nothing,
        _catching_up=catching_up,
        _begin=nothing,
        replica=replica,
        epoch=0,
        position=0,
        progress=types.SimpleNamespace(view=lambda: None),
        roster_peers=nothing,
    )
