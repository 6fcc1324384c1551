"""Starting, stopping, killing and starting again."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.catching_up import Recover
from atoll.coordinator.heads import AskHead, PeerHead
from atoll.coordinator.history import History
from atoll.coordinator.relocating import OwnPlace
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.keys import KeysError
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import RoundReport
from atoll.coordinator.service.server import (
    InUse,
    NodeRequest,
    NoSuchHost,
    Running,
    WrongDirectory,
    running,
    serve,
)
from atoll.optim.log.live_replica import LiveReplica
from atoll.optim.log.store_errors import StoreCorrupt
from support.forks import Forked


def with_coordinator(spec: RunSpec, **changes: Any) -> RunSpec:
    fields = spec.model_dump()
    return RunSpec.from_dict({**fields, "coordinator": {**fields["coordinator"], **changes}})


def test_started_again_it_knows_all_it_knew(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        swarm = kit.Swarm()
        async with kit.net(tmp_path / "run", swarm) as net:
            one, *_ = await net.started()
            for _ in range(3):
                entry, body = swarm.entry(net.run_id, net.up.coordinator.log.head())
                await net.publish(one, entry, body)
            trace = RoundReport(position=2, included=True, seconds={"send": 1.0})
            await one.heartbeat(swarm.status(0, position=3), traces=[trace])
            before, invite = await one.status(), str(net.up.invite)
            record = net.up.coordinator.log.replica.epoch_record
            root = net.up.coordinator.log.replica.state.root()
        snapshot = tmp_path / "run" / "log" / "snapshot-000000000002.bin"
        snapshot.write_bytes(b"damaged")  # the log has everything since the genesis
        async with kit.net(tmp_path / "run", swarm) as net:
            assert str(net.up.invite) == invite
            coordinator = net.up.coordinator
            assert coordinator.log.replica.state.root() == root
            assert coordinator.log.replica.epoch_record == record
            after = await net.client(0).status()
            assert after.history == before.history
            assert (after.position, after.chain) == (before.position, before.chain)
            assert (after.tokens_total, after.started_at) == (
                before.tokens_total,
                before.started_at,
            )
            assert {p.peer_id: p.state for p in after.peers} == {
                i.peer_id: "gone" for i in swarm.identities
            }
            texts = [event.text for event in after.events]
            assert texts.count("epoch 0 opened at position 0 with 3 peers") == 1
            entry, body = swarm.entry(net.run_id, coordinator.log.head())
            client = net.client(0)
            await client.join()
            assert await net.publish(client, entry, body)

    kit.run(main())


def test_the_spec_is_on_the_disk_once_it_has_its_name(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start writes it: a loss of power soon after left it empty, and no start succeeded."""
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino))

    async def main() -> None:
        state_dir = tmp_path / "state"
        async with running(kit.SPEC, kit.genesis, state_dir):
            assert {(state_dir / "spec.json").stat().st_ino, state_dir.stat().st_ino} <= synced

    asyncio.run(main())


def test_sessions_outlive_a_restart(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        swarm = kit.Swarm()
        async with kit.net(tmp_path / "run", swarm) as net:
            client = CoordinatorClient(net.up.invite, swarm.identities[0])
            await client.join()
        async with kit.net(tmp_path / "run", swarm):
            beat = await retried(lambda: client.heartbeat(swarm.status(0)))
            assert beat.head.position == 0
            await client.close()

    kit.run(main())


async def retried(call: Callable[[], Any]) -> Any:
    from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable

    for _ in range(20):
        try:
            return await call()
        except CoordinatorUnreachable:
            await asyncio.sleep(0.05)
    return await call()


def test_files_are_private(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run"):
            mode = stat.S_IMODE((tmp_path / "run" / "keys.json").stat().st_mode)
            assert mode == 0o600
            assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700

    kit.run(main())


def refused(kit: Any, spec: RunSpec, state_dir: Path, kind: type[Exception], told: str) -> None:
    async def main() -> None:
        with pytest.raises(kind, match=told):
            async with running(spec, kit.genesis, state_dir):
                raise AssertionError("it started")

    kit.run(main())


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_directory_of_another_run_is_left_alone(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run", kit.Swarm()) as net:
            await net.started()  # with an epoch, the run has begun

    kit.run(main())
    before = snapshot(tmp_path)
    other = RunSpec.from_dict({**kit.SPEC.model_dump(), "inner": {"lr": 0.1}})
    told = r"inner.lr: 0.0015 != 0.1.*--state-dir DIR.*run\.name.*remove"
    refused(kit, other, tmp_path / "run", WrongDirectory, told)
    assert snapshot(tmp_path) == before


def test_a_run_that_nobody_began_takes_an_edited_spec(kit: Any, tmp_path: Path) -> None:
    other = RunSpec.from_dict({**kit.SPEC.model_dump(), "inner": {"lr": 0.1}})

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            busy = with_coordinator(other, listen=net.up.address)
            with pytest.raises(InUse, match="--listen HOST:PORT"):
                async with running(busy, kit.genesis, tmp_path / "failed"):
                    pass
            before = net.run_id
        for name in ("run", "failed"):
            keys = (tmp_path / name / "keys.json").read_bytes()
            spec = other if name == "run" else kit.SPEC
            async with kit.net(tmp_path / name, kit.Swarm(), spec=spec) as net:
                assert net.run_id != before
                await net.started()
            assert (tmp_path / name / "keys.json").read_bytes() == keys

    kit.run(main())


def test_a_run_that_lost_its_log_keeps_its_spec(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run"):
            pass

    kit.run(main())
    shutil.rmtree(tmp_path / "run" / "log")
    other = RunSpec.from_dict({**kit.SPEC.model_dump(), "inner": {"lr": 0.1}})
    refused(kit, other, tmp_path / "run", WrongDirectory, "holds the state of another run")


def test_an_advertised_name_without_an_address_is_refused(kit: Any, tmp_path: Path) -> None:
    for name in ("no such host", "203.0.113.7:7700", "x" * 300):
        spec = with_coordinator(kit.SPEC, advertise=name)
        refused(kit, spec, tmp_path / "run", NoSuchHost, "cannot resolve .* pass --advertise")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("advertise", "is_public"),
    [("203.0.113.7", False), ("10.1.2.3", False), ("localhost", False), ("1.1.1.1", True)],
)
def test_an_invite_without_a_public_address_is_known(
    kit: Any, tmp_path: Path, advertise: str, is_public: bool
) -> None:
    async def main() -> None:
        spec = with_coordinator(kit.SPEC, advertise=advertise)
        async with kit.net(tmp_path / "run", spec=spec) as net:
            assert net.up.is_public is is_public

    kit.run(main())


def test_the_coordinator_may_move(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            before = net.run_id
        moved = with_coordinator(kit.SPEC, advertise="localhost")
        async with kit.net(tmp_path / "run", spec=moved) as net:
            assert net.run_id == before
            assert net.up.invite.addresses[0].startswith("localhost:")

    kit.run(main())


def test_a_directory_of_something_else(kit: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("chapter one")
    refused(kit, kit.SPEC, tmp_path, WrongDirectory, "contains 'thesis.tex'; choose another")
    refused(kit, kit.SPEC, tmp_path / "thesis.tex", WrongDirectory, "got a file")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_coordinators_in_one_directory_or_on_one_port(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            with pytest.raises(InUse, match="another coordinator uses this directory"):
                async with running(kit.SPEC, kit.genesis, tmp_path / "run"):
                    pass
            spec = with_coordinator(kit.SPEC, listen=net.up.address)
            with pytest.raises(InUse, match="the port is in use"):
                async with running(spec, kit.genesis, tmp_path / "other"):
                    pass

    kit.run(main())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("keys.json", KeysError),
        ("log/log.sqlite", StoreCorrupt),
        ("spec.json", WrongDirectory),
        ("genesis.root", WrongDirectory),
    ],
)
def test_a_damaged_file_stops_it(
    kit: Any, tmp_path: Path, name: str, kind: type[Exception]
) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run"):
            pass

    kit.run(main())
    for path in (tmp_path / "run" / "log").glob("*-wal"):
        path.unlink()
    (tmp_path / "run" / name).write_bytes(b"rubbish" * 1000)
    refused(kit, kit.SPEC, tmp_path / "run", kind, r"damaged|not a database")
    assert (tmp_path / "run" / name).read_bytes() == b"rubbish" * 1000


def test_a_damaged_history_is_made_again_from_the_log(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        swarm = kit.Swarm()
        async with kit.net(tmp_path / "run", swarm) as net:
            one, *_ = await net.started()
            entry, body = swarm.entry(net.run_id, net.up.coordinator.log.head())
            await net.publish(one, entry, body)
        for path in (tmp_path / "run").glob("history.db*"):
            path.unlink()
        (tmp_path / "run" / "history.db").write_bytes(b"rubbish" * 1000)
        async with kit.net(tmp_path / "run", swarm) as net:
            (summary,) = net.up.coordinator.status().history
            assert (summary.position, summary.tokens, summary.loss) == (1, 300, 2.5)
            assert (tmp_path / "run" / "history.db.damaged").exists()

    kit.run(main())


class FakeNode:
    addresses = ("/ip4/127.0.0.1/tcp/7701/p2p/12D3KooW",)
    closed = False

    def recover(self, module: str) -> Recover:
        """Nobody is there to recover from."""

        async def recover(replica: LiveReplica, on_taken: Callable[[int], None]) -> None:
            return None

        return recover

    def ask_head(self, module: str) -> AskHead:
        """Nobody answers."""

        async def ask(peer_id: str) -> PeerHead | None:
            return None

        return ask

    async def introduce(self, question: bytes) -> bytes:
        """Nobody is known."""
        return b""

    def tell_place(self, place: OwnPlace) -> None:
        """Nobody to tell."""

    async def direct_connections(self) -> dict[str, list[str]]:
        """Nobody is connected."""
        return {}

    async def close(self) -> None:
        self.closed = True


def test_a_history_on_a_full_disk_is_not_taken_for_damaged(tmp_path: Path) -> None:
    """It was put aside, and all that people knew of the run with it."""
    path = tmp_path / "history.db"
    History(path).close()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # as a full disk
    try:
        with pytest.raises(sqlite3.OperationalError):
            History(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.exists() and not path.with_name("history.db.damaged").exists()


def test_the_dht_node_lives_with_it_and_is_in_the_invite(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        node, requests = FakeNode(), []

        async def start(request: NodeRequest) -> FakeNode:
            requests.append(request)
            return node

        ready: list[Running] = []
        stop = asyncio.Event()
        task = asyncio.create_task(
            serve(
                kit.SPEC,
                kit.genesis,
                tmp_path / "run",
                stop=stop,
                start_node=start,
                on_ready=lambda up: (ready.append(up), stop.set()),
            )
        )
        await task
        assert ready[0].invite.bootstrap == FakeNode.addresses and node.closed
        (request,) = requests
        assert (request.host, request.identity_path.name) == ("127.0.0.1", "node.key")
        request.check("me", request.admit("me"))

    kit.run(main())


def test_metrics(kit: Any, tmp_path: Path) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def main() -> None:
        spec = with_coordinator(kit.SPEC, metrics_listen=f"127.0.0.1:{port}")
        async with kit.net(tmp_path / "run", spec=spec) as net:
            one, *_ = await net.started()
            shares = {"train": 0.75, "wait": 0.25}
            await one.heartbeat(net.swarm.status(0, time_shares=shares))
            await asyncio.sleep(0.6)
            address = f"http://127.0.0.1:{port}/metrics"
            read = await asyncio.to_thread(lambda: urllib.request.urlopen(address).read())
            assert b"atoll_run_peers 3.0" in read and b"atoll_peer_last_seen_s{" in read
            assert len(re.findall(rb'atoll_run_state\{state="\w+"\} 1.0', read)) == 1
            assert re.search(rb'atoll_peer_time_share\{peer_id=".*",use="train"\} 0.75', read)

    kit.run(main())


def test_a_metrics_address_that_is_taken_is_named(kit: Any, tmp_path: Path) -> None:
    import socket

    async def main() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            address = f"127.0.0.1:{other.getsockname()[1]}"
            spec = with_coordinator(kit.SPEC, metrics_listen=address)
            with pytest.raises(OSError, match="another address for the metrics") as caught:
                async with kit.net(tmp_path / "run", spec=spec):
                    pass
            assert caught.value.filename == address

    kit.run(main())


CHILD = """
import asyncio, importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("coordinator_kit", sys.argv[1])
kit = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = kit
spec.loader.exec_module(kit)
from atoll.coordinator.service.server import serve

def ready(up):
    up.coordinator.log.ask_head_with(kit.answering(up.coordinator))
    print(up.invite, flush=True)

asyncio.run(serve(kit.SPEC, kit.genesis, Path(sys.argv[2]), stop=asyncio.Event(),
                  on_ready=ready))
"""


def start(kit: Any, state_dir: Path) -> tuple[Forked, Invite]:
    program = state_dir.with_name("coordinator.py")
    program.write_text(CHILD)
    child = Forked(kit.__file__, state_dir, program=program, stdout=subprocess.PIPE)
    return child, Invite.decode(child.stdout.readline())


def kill(child: Forked) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait(20)
    child.stdout.close()


@pytest.mark.slow
def test_killed_with_kill_9_and_started_again(kit: Any, tmp_path: Path) -> None:
    swarm = kit.Swarm()

    async def talk(invite: Invite, position: int) -> None:
        clients = [CoordinatorClient(invite, identity) for identity in swarm.identities]
        for index, client in enumerate(clients):
            await client.join()
            await client.heartbeat(swarm.status(index))
        beat = await clients[0].heartbeat(swarm.status(0))
        while not beat.epoch:
            await asyncio.sleep(0.05)
            beat = await clients[0].heartbeat(swarm.status(0))
        assert beat.head.position == position
        entry, body = swarm.entry(invite.run_id, beat.head)
        published = await clients[0].publish(
            epoch=0,
            position=position,
            entry=entry.encode(),
            certificate=swarm.certify(entry).encode(),
            body=body,
        )
        assert published.accepted and published.head.position == position + 1
        for client in clients:
            await client.close()

    child, first = start(kit, tmp_path / "run")
    try:
        kit.run(talk(first, 0))
    finally:
        kill(child)
    child, second = start(kit, tmp_path / "run")
    try:
        assert second == first
        kit.run(talk(second, 1))
    finally:
        kill(child)


def test_the_log_is_synced(kit: Any, tmp_path: Path) -> None:
    """A coordinator that lost its last entries with the power would decide them anew."""

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            store = net.up.coordinator.log.replica.store
            full = 2  # of SQLite's `synchronous`: every commit is synced
            assert store._db.execute("PRAGMA synchronous").fetchone() == (full,)

    kit.run(main())
