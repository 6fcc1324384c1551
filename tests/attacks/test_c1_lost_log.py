"""C1: a coordinator without its log signs a second log, or waits beside peers that hold it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.catching_up import LAG_S
from atoll.coordinator.epochs import LEARN_S
from atoll.coordinator.policies import STALL_S
from atoll.coordinator.run.keys import KEYS_FILE, RunKeys
from atoll.coordinator.run.status import RoundReport
from atoll.coordinator.service import server
from atoll.coordinator.signing import SIGNED_FILE, EpochSigner, SignedAlready, read_signed
from atoll.optim.log.entry import Epoch, epoch_payload
from atoll.optim.log.replica import Replica
from support import kit
from support.donors import Clock, StoreSource, answering, recovering
from support.logs import open_replica


def payload(epoch: int) -> bytes:
    elector = kit.Swarm().electors()[0]
    record = Epoch(
        run_id=b"r" * 32,
        epoch=epoch,
        base_position=0,
        base_chain=b"c" * 32,
        electorate=(elector,),
    )
    return epoch_payload(record.encode())


def test_the_number_is_on_disk_before_the_signature_leaves(tmp_path: Path) -> None:
    path, seen = tmp_path / SIGNED_FILE, list[str]()
    signer = EpochSigner(path, lambda data: seen.append(path.read_text()) or b"signature")
    assert (signer.highest, signer.left) == (None, None)
    assert signer.sign(payload(3)) == b"signature"
    assert seen == ["3 -1\n"] and path.stat().st_mode & 0o777 == 0o600
    assert read_signed(path) == (3, -1)  # a crash here: nobody has it, and nobody is asked for it
    signer.note(3)
    assert path.read_text() == "3\n" and read_signed(path) == (3, 3)
    for epoch in (0, 3):
        with pytest.raises(SignedAlready, match=f"above 3, .* got {epoch}"):
            EpochSigner(path, lambda data: b"never").sign(payload(epoch))
    for rubbish in ("rubbish", "1 2 3", ""):
        path.write_text(rubbish)
        assert read_signed(path) == (None, None)
    path.write_text("3 7\n")  # no epoch leaves unsigned
    assert read_signed(path) == (3, 3)


async def two_epochs(net: kit.Net, clock: Clock) -> None:
    """Decide three entries in epoch 0, and two in epoch 1."""
    coordinator = net.up.coordinator
    coordinator._steady = clock
    one, *_ = await net.started()
    for count in (3, 2):
        for _ in range(count):
            entry, body = net.swarm.entry(net.run_id, coordinator.log.head())
            assert await net.publish(one, entry, body)
        trace = RoundReport(
            position=coordinator.log.head().position - 1,
            epoch=coordinator.log.head().epoch,
            included=True,
            seconds={"send": 1.0},
        )
        position = coordinator.log.head().position
        await one.heartbeat(net.swarm.status(0, position=position), traces=[trace])
        while coordinator.log.head().epoch == 0:
            clock.now_s += 1.0
            for index in range(3):
                status = net.swarm.status(index, state="syncing", position=position)
                await net.clients[index].heartbeat(status)
            await coordinator.tick()
    assert (coordinator.log.head().epoch, coordinator.log.head().position) == (1, 5)


@pytest.fixture(autouse=True)
def only_this_test_lets_time_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own tick would come between two steps of the test."""
    monkeypatch.setattr(server, "TICK_S", 3600.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def donor_of(folder: Path, net: kit.Net) -> Replica:
    """Open a copy of the coordinator's log, as a peer of the run holds it."""
    copy = folder.with_name("donor")
    shutil.copytree(folder / "log", copy)
    keys = RunKeys.load_or_create(folder / KEYS_FILE)
    return open_replica(copy, keys, run_id=net.run_id)


@pytest.mark.parametrize(
    ("lost", "knows"),  # of the log, and beside it
    [
        pytest.param("log", "number", marks=pytest.mark.exhaustive),
        ("empty", "history"),
        ("all but the keys", "nothing"),  # as they come back from a backup
        ("log", "nothing"),
        pytest.param("log/log.sqlite", "history", marks=pytest.mark.exhaustive),
        pytest.param("empty", "number", marks=pytest.mark.exhaustive),
    ],
)
def test_a_lost_log_comes_back_from_the_peers(folder: Path, lost: str, knows: str) -> None:
    async def main() -> None:
        swarm, clock = kit.Swarm(), Clock()
        async with kit.net(folder, swarm) as net:
            await two_epochs(net, clock)
            before = net.up.coordinator.status()
        donor = donor_of(folder, net)
        if knows != "number":  # a directory of an earlier version
            (folder / SIGNED_FILE).unlink()
        if knows == "nothing":
            (folder / "history.db").unlink()
        if lost == "all but the keys":
            kept = (folder / KEYS_FILE).read_bytes()
            shutil.rmtree(folder)
            folder.mkdir()
            (folder / KEYS_FILE).write_bytes(kept)
            (folder / KEYS_FILE).chmod(0o600)
        elif lost == "empty":
            (folder / "log" / "log.sqlite").write_bytes(b"")
        elif lost == "log":
            shutil.rmtree(folder / "log")
        else:
            (folder / lost).unlink()
        async with kit.net(folder, swarm) as net:
            coordinator = net.up.coordinator
            coordinator._steady = clock
            clients = [net.client(i) for i in range(3)]
            for client in clients:
                await client.join()

            async def pass_time(seconds: float, **status: Any) -> None:
                for _ in range(int(seconds)):
                    clock.now_s += 1.0
                    for index, client in enumerate(clients):
                        await client.heartbeat(swarm.status(index, **status))
                    await coordinator.tick()
                    if coordinator.log._catching_up and coordinator.log._catching_up._task:
                        await coordinator.log._catching_up._task

            def texts() -> list[str]:
                return [event.text for event in coordinator.status().events]

            assert sum("which the log here lacks" in text for text in texts()) == 1
            if knows != "nothing":
                assert coordinator.status().history == before.history  # nothing is forgotten
            # Fresh peers answer, and hold no epoch: that proves nothing, and none is opened.
            await pass_time(2 * (STALL_S + LEARN_S))
            assert coordinator.log.replica.opened is None
            # Peers that hold the run.
            coordinator.log.ask_head_with(answering(swarm, donor))
            catching_up = coordinator.log.recover_with(recovering(StoreSource(donor)))
            await pass_time(3 * LAG_S, state="training", epoch=1, position=5)
            assert "epoch 1 learned from peers; fetching its entries" in texts()
            assert coordinator.log.head() == donor.head
            assert coordinator.log.replica.state.root() == donor.state.root()
            assert coordinator.log.replica.electorate == donor.electorate
            after = coordinator.status()
            assert after.tokens_total == before.tokens_total
            assert after.history == before.history or knows == "nothing"
            # A stall now opens epoch 2, and no epoch 0 or 1 again.
            if knows == "nothing":  # any peer may have a newer one
                await pass_time(LEARN_S - 3 * LAG_S - 5, state="syncing", epoch=1, position=5)
                assert coordinator.log._epochs.lacks_epochs
                await pass_time(6, state="syncing", epoch=1, position=5)
            await pass_time(STALL_S + 5, state="syncing", epoch=1, position=5)
            assert (coordinator.log.head().epoch, coordinator.log.head().position) == (2, 5)
            assert (folder / SIGNED_FILE).read_text() == "2\n"
            await catching_up.close()
        donor.store.close()

    kit.run(main())


async def stalled(net: kit.Net, clock: Clock, seconds: float) -> None:
    """Let peers that hold nothing report, and answer, that they cannot go on."""
    clients = [net.client(i) for i in range(3)]
    for client in clients:
        await client.join()
    for _ in range(int(seconds)):
        clock.now_s += 1.0
        for index, client in enumerate(clients):
            await client.heartbeat(net.swarm.status(index, state="syncing"))
        await net.up.coordinator.tick()


def test_an_old_copy_of_the_log_signs_no_epoch_that_peers_hold(folder: Path) -> None:
    async def main() -> None:
        swarm, clock = kit.Swarm(), Clock()
        async with kit.net(folder, swarm) as net:
            await net.started()
        old = folder.with_name("old")
        shutil.copytree(folder / "log", old)
        async with kit.net(folder, swarm) as net:
            net.up.coordinator._steady = clock
            await stalled(net, clock, STALL_S + 5)
            assert net.up.coordinator.log.head().epoch == 1
        shutil.rmtree(folder / "log")
        shutil.copytree(old, folder / "log")
        async with kit.net(folder, swarm) as net:
            net.up.coordinator._steady = clock
            await stalled(net, clock, 4 * STALL_S)
            assert net.up.coordinator.log.head().epoch == 0  # whoever answers without epoch 1
        async with kit.net(folder, swarm, accept_loss=True) as net:
            net.up.coordinator._steady = clock
            await stalled(net, clock, STALL_S + 5)
            assert net.up.coordinator.log.head().epoch == 2  # the number is skipped, not used again

    kit.run(main())


def test_an_epoch_that_a_crash_cut_short_is_skipped_at_once(folder: Path) -> None:
    """Its record was not in the log yet, so no peer can have it."""

    async def main() -> None:
        swarm, clock = kit.Swarm(), Clock()
        async with kit.net(folder, swarm) as net:
            await net.started()
        (folder / SIGNED_FILE).write_text("1 0\n")
        async with kit.net(folder, swarm) as net:
            net.up.coordinator._steady = clock
            await stalled(net, clock, STALL_S + 5)
            assert net.up.coordinator.log.head().epoch == 2
        assert (folder / SIGNED_FILE).read_text() == "2\n"

    kit.run(main())


def test_an_old_copy_of_the_log_voids_no_rounds_that_peers_hold(folder: Path) -> None:
    """Of the same epoch: the history knows that there were more rounds."""

    async def main() -> None:
        swarm, clock = kit.Swarm(), Clock()
        async with kit.net(folder, swarm) as net:
            await net.started()
        old = folder.with_name("old")
        shutil.copytree(folder / "log", old)
        async with kit.net(folder, swarm) as net:
            client = net.client(0)
            await client.join()
            for _ in range(3):
                entry, body = swarm.entry(net.run_id, net.up.coordinator.log.head())
                assert await net.publish(client, entry, body)
            tokens = net.up.coordinator.status().tokens_total
        donor = donor_of(folder, net)
        shutil.rmtree(folder / "log")
        shutil.copytree(old, folder / "log")
        async with kit.net(folder, swarm) as net:
            coordinator = net.up.coordinator
            coordinator._steady = clock
            texts = [event.text for event in coordinator.status().events]
            assert any("the log here ends after round 0 of 3" in text for text in texts)
            await stalled(net, clock, 2 * STALL_S)
            assert coordinator.log.head().epoch == 0
            client = net.client(0)
            await client.join()
            for position in range(3):
                record = donor.store.get(position)
                assert record is not None
                await client.publish(
                    epoch=0,
                    position=position,
                    entry=record.entry,
                    certificate=record.certificate,
                    body=donor.store.body(position),
                )
            await stalled(net, clock, STALL_S + 5)
            assert (coordinator.log.head().epoch, coordinator.log.head().position) == (1, 3)
            assert coordinator.status().tokens_total == tokens
        shutil.rmtree(folder / "log")
        shutil.copytree(old, folder / "log")
        async with kit.net(folder, swarm, accept_loss=True) as net:
            net.up.coordinator._steady = clock
            await stalled(net, clock, STALL_S + 5)
            assert net.up.coordinator.log.head().epoch == 2
            assert net.up.coordinator.status().tokens_total == 0
        donor.store.close()

    kit.run(main())


def test_nobody_knows_how_many_epochs_were_signed(folder: Path) -> None:
    """The organiser accepts the loss of the log and of all that knew its epochs."""

    async def main() -> None:
        swarm, clock = kit.Swarm(), Clock()
        async with kit.net(folder, swarm) as net:
            await net.started()
        shutil.rmtree(folder / "log")
        (folder / SIGNED_FILE).unlink()
        async with kit.net(folder, swarm, accept_loss=True) as net:
            coordinator = net.up.coordinator
            coordinator._steady = clock
            await net.started()
            assert coordinator.log.head().epoch >= server.MANY_EPOCHS

    kit.run(main())
