"""Processes as people start them: a coordinator's machine is lost, and then every machine."""

import asyncio
import contextlib
import shutil
import socket
import sqlite3
from pathlib import Path

import pytest

from atoll.coordinator.run.spec import RunSpec, template
from atoll.coordinator.run.status import RunStatus
from atoll.optim.log.entry import Entry, extend_chain, sha256
from atoll.optim.log.store import LOG_FILE
from atoll.peer.lab.children import BAD_INPUT, Child
from support.child_runs import PEER, status_when, until, write_spec

# In one process: tests/coordinator/copies.
pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(480)]

TEXT = "What one machine has lost, another one has. " * 2000
PATIENCE_S = 240.0  # an epoch opens a minute after a run has come to stand still


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def chain_of(state: Path, folder: str = "log") -> list[bytes]:
    """Check that the entries of a log follow each other; return the chain before each."""
    log = f"file:{state / folder / LOG_FILE}?mode=ro"
    with contextlib.closing(sqlite3.connect(log, uri=True)) as db:
        rows = db.execute("SELECT position, entry FROM entries ORDER BY position").fetchall()
    chains = [Entry.decode(rows[0][1]).previous_chain]
    for number, (position, raw) in enumerate(rows):
        assert position == number
        assert Entry.decode(raw).previous_chain == chains[-1]
        chains.append(extend_chain(chains[-1], sha256(raw)))
    return chains


class Lab:
    """A run whose coordinators have the same ports, as behind one name."""

    def __init__(self, folder: Path, *, snapshot_every: int = 4) -> None:
        self.folder, self.copies = folder, folder / "copies"
        rounds = {"snapshot_every": snapshot_every}
        path = write_spec(folder, text=TEXT, run={"name": "kept"}, round=rounds)
        fields = RunSpec.load(path).model_dump(mode="json")
        fields["coordinator"] |= {
            "listen": f"127.0.0.1:{free_port()}",
            "dht_listen": f"127.0.0.1:{free_port()}",
            "copies": str(self.copies),
        }
        path.write_text(template(RunSpec.from_dict(fields)))
        self.spec = path
        self.children: list[Child] = []

    async def start(self, name: str, *arguments: object) -> Child:
        log = self.folder / f"{name}.log"
        self.children.append(await Child.start(name, log, list(map(str, arguments))))
        return self.children[-1]

    async def coordinator(self, name: str, *arguments: object) -> tuple[Child, str]:
        state, file = self.folder / name, self.folder / f"{name}.invite"
        child = await self.start(
            f"{name}-coordinator",
            *("coordinator", *arguments, "--state-dir", state, "--invite-file", file),
            "--stop-with-stdin",
        )
        await until(file.exists, child)
        return child, file.read_text().strip()

    async def peer(self, name: str, invite: str) -> Child:
        state, text = self.folder / name, self.folder / "text.txt"
        named = ("--name", name, "--state-dir", state, "--data", text)
        return await self.start(name, "peer", invite, *PEER, *named)

    async def seen(self, invite: str, condition, *children: Child) -> RunStatus:
        return await status_when(invite, condition, children, patience_s=PATIENCE_S, look_s=2.0)

    async def lose(self, *children: Child) -> None:
        for child in children:
            child.kill()
            await child.stop()
            self.children.remove(child)


async def hold(folder: Path) -> None:
    lab = Lab(folder)
    key = folder / "recovery.key"
    try:
        first, invite = await lab.coordinator("first", lab.spec)
        peers = [await lab.peer(name, invite) for name in ("one", "two")]
        copied = await lab.seen(
            invite, lambda now: now.copies and now.copies.position >= 4, first, *peers
        )
        before = await lab.seen(
            invite, lambda now: now.position > copied.copies.position + 2, first, *peers
        )
        shutil.copy(folder / "first" / "recovery.key", key)
        await lab.lose(first)
        shutil.rmtree(folder / "first")

        restored = ("--restore", lab.copies, "--recovery-key", key)
        second, again = await lab.coordinator("second", *restored)
        assert again == invite
        now = await lab.seen(invite, lambda now: now.position > before.position + 4, second, *peers)
        assert now.epoch == 0  # the peers' own: nothing was decided twice, nothing void
        chains = chain_of(folder / "second")
        assert chains[before.position].hex() == before.chain
        end = await lab.seen(
            invite, lambda status: status.copies.position > now.position, second, *peers
        )

        await lab.lose(second, *peers)
        for name in ("second", "one", "two"):
            shutil.rmtree(folder / name)
        third, again = await lab.coordinator("third", *restored, "--accept-loss")
        assert again == invite
        start = await lab.seen(invite, lambda now: True, third)
        assert start.position >= end.copies.position
        peers = [await lab.peer(name, invite) for name in ("three", "four")]
        await lab.seen(invite, lambda now: now.position > start.position + 2, third, *peers)
        after = chain_of(folder / "third")
        assert after[before.position] == chains[before.position]
    finally:
        for child in reversed(lab.children):
            await child.stop()


async def supersede(folder: Path) -> None:
    """The old coordinator was only out of reach: it runs on, or comes back."""
    lab = Lab(folder)
    listen, dht_listen = (f"127.0.0.1:{free_port()}" for _ in range(2))
    addresses = ("--listen", listen, "--dht-listen", dht_listen)
    try:
        first, invite = await lab.coordinator("first", lab.spec)
        await lab.seen(invite, lambda now: now.copies and now.copies.at, first)
        restored = ("--restore", lab.copies, "--recovery-key", folder / "first" / "recovery.key")
        second, _ = await lab.coordinator("second", *restored, *addresses)
        signed = (folder / "first" / "epoch.signed").read_bytes()
        async with asyncio.timeout(60):
            while first.running:
                await asyncio.sleep(0.5)
        assert first.exit_code == BAD_INPUT
        again = await lab.start("back", "coordinator", lab.spec, "--state-dir", folder / "first")
        async with asyncio.timeout(60):
            while again.running:
                await asyncio.sleep(0.5)
        assert again.exit_code == BAD_INPUT
        for ended in (first, again):
            assert "restored from its copies by another coordinator" in str(ended.failure())
        assert (folder / "first" / "epoch.signed").read_bytes() == signed
        assert second.running
    finally:
        for child in reversed(lab.children):
            await child.stop()


def test_an_old_coordinator_ends_and_does_not_start_again(tmp_path: Path) -> None:
    asyncio.run(supersede(tmp_path))


async def outlive_an_epoch(folder: Path) -> None:
    """The peers are an epoch beyond the copy that the coordinator is restored from."""
    # Such toy rounds take 0.1 s, and a snapshot is there for two periods at most: long enough to
    # be fetched, as between those of a real run.
    lab, aside = Lab(folder, snapshot_every=64), folder / "aside"
    try:
        first, invite = await lab.coordinator("first", lab.spec)
        peers = [await lab.peer(name, invite) for name in ("one", "two")]
        await lab.seen(invite, lambda now: now.copies and now.copies.position >= 4, first, *peers)
        key = shutil.copy(folder / "first" / "recovery.key", folder / "recovery.key")
        shutil.copytree(lab.copies, aside)
        await lab.lose(*peers)
        peers = [await lab.peer(name, invite) for name in ("one", "two")]
        opened = await lab.seen(invite, lambda now: now.epoch > 0, first, *peers)
        before = await lab.seen(
            invite, lambda now: now.position > opened.position + 2, first, *peers
        )
        await lab.lose(first)
        shutil.rmtree(folder / "first")
        second, again = await lab.coordinator("second", "--restore", aside, "--recovery-key", key)
        assert again == invite
        now = await lab.seen(invite, lambda now: now.position > before.position + 4, second, *peers)
        assert now.epoch == before.epoch  # learned from the peers; no rival was opened
        assert chain_of(folder / "second")[before.position].hex() == before.chain
    finally:
        for child in reversed(lab.children):
            await child.stop()


def test_peers_an_epoch_beyond_the_copy_bring_it_up_to_date(tmp_path: Path) -> None:
    asyncio.run(outlive_an_epoch(tmp_path))


def test_a_run_outlives_its_coordinator_and_then_all_of_its_machines(tmp_path: Path) -> None:
    asyncio.run(hold(tmp_path))
