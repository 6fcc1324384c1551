"""The attacks of `scripts/bench_attacks.py` that are refused before they reach a round.

Each is tried once, on real code: a coordinator with its server on loopback, a node with its p2pd,
the command line, or the function that opens what a run names. What is reported is what came back.
"""

import asyncio
import contextlib
import heapq
import io
import os
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import msgpack
import torch
from attacks_rows import peak_mb
from hivemind.dht.storage import DictionaryDHTValue

from atoll.coordinator.checkpoints import Checkpoint, save_checkpoint
from atoll.coordinator.epochs import LEARN_S
from atoll.coordinator.heads import PATIENCE_S, PeerHead
from atoll.coordinator.notices import LOG_LOST
from atoll.coordinator.policies import CALL_BURST, STALL_S, CallLimits
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.addresses import split_address
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import PeerStatus
from atoll.coordinator.service import server
from atoll.coordinator.service.service import UNBEGUN_OF_ONE
from atoll.dht.bindings import DHTProtocol, PeerID
from atoll.dht.identity import Identity
from atoll.dht.tasks import beside
from atoll.optim.log.entry import Newcomer
from atoll.optim.state.layout import Layout
from atoll.peer.cli import main as cli
from atoll.peer.errors import DataError, ModelError
from atoll.peer.training.opening import build_model, open_corpus
from atoll.peer.training.permission import Allowed
from support import kit
from support.donors import Clock
from support.evil_coordinator import EvilCoordinator
from support.strangers import ROSTER_ID, admission, begin_calls, members, signed

KEYS = 9  # of one invite, as in the review of the protocol
PEERS = 5_000
REPORTING_S = 60.0  # of theirs
RECORDS = 2_000
IDLE = 400  # connections; below the limit of open files of one process
CALLS = 200
ESCAPES = set("\x1b\x07\x9b\u202e\r")
DEADLINE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Happened:
    """The result of an attempt."""

    held: bool
    """whether the defence held"""
    happened: str


@dataclass(frozen=True, kw_only=True)
class Door:
    """An attempt, as it is reported."""

    attack: str
    tried: str
    held: bool
    happened: str
    seconds: float
    memory_mb: float
    """growth of the peak memory of the process that has both sides"""


def _first_line(text: object) -> str:
    line = str(text).strip().splitlines()[0]
    return line if len(line) <= 200 else f"{line[:199]}…"


def _run(main: object) -> Happened:
    async def within() -> Happened:
        async with asyncio.timeout(DEADLINE_S):
            return await main

    return asyncio.run(within())


def command(*arguments: object) -> tuple[int, str]:
    """Run `atoll ...`; return its exit code and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    return code, printed.getvalue()


async def refusal(client: CoordinatorClient) -> str:
    """Join; return the refusal, or nothing."""
    try:
        await client.join()
    except CoordinatorError as error:
        return _first_line(error)
    return ""


def newcomer(net: kit.Net, key: Identity) -> CoordinatorClient:
    client = CoordinatorClient(net.up.invite, key)
    net.stack.push_async_callback(client.close)
    return client


# the coordinator


async def _c1(folder: Path) -> Happened:
    swarm = kit.Swarm()
    async with kit.net(folder, swarm) as net:
        one, *_ = await net.started()
        for _ in range(3):
            entry, body = swarm.entry(net.run_id, net.up.coordinator.log.head())
            assert await net.publish(one, entry, body)
    shutil.rmtree(folder / "log")
    async with kit.net(folder, swarm) as net:
        coordinator, clock = net.up.coordinator, Clock()
        coordinator._steady = clock
        clients = [net.client(index) for index in range(3)]
        for client in clients:
            await client.join()
        for _ in range(2 * int(STALL_S + LEARN_S)):
            clock.now_s += 1.0
            for index, client in enumerate(clients):
                await client.heartbeat(swarm.status(index))
            await coordinator.tick()
        said = next(e.text for e in coordinator.status().events if e.code == LOG_LOST)
        opened = coordinator.log.replica.opened
        epochs = "no epoch" if opened is None else f"epoch {opened.epoch}"
        return Happened(
            held=opened is None,
            happened=f"signed {epochs} with three fresh peers, which answered for four minutes; "
            f"reported: {_first_line(said)}",
        )


async def _c2(folder: Path) -> Happened:
    async with kit.net(folder) as net:
        for key in [Identity.ephemeral() for _ in range(KEYS)]:
            client = newcomer(net, key)
            await client.join()
            status = PeerStatus(peer_id=key.peer_id, incarnation="1", state="ready")
            await client.heartbeat(status)
        await net.up.coordinator.tick()
        state = net.up.coordinator.status().state
        await net.started()
        electorate = {e.peer_id for e in net.up.coordinator.log.replica.electorate}
        honest = {identity.peer_id for identity in net.swarm.identities}
        return Happened(
            held=state == "waiting" and electorate == honest,
            happened=f"the run was {state}; with three honest peers, {len(electorate - honest)} of "
            f"the keys and {len(electorate & honest)} of the peers are electors",
        )


async def _c2_stall(folder: Path) -> Happened:
    async with kit.net(folder) as net:
        coordinator, clock = net.up.coordinator, Clock()
        coordinator._steady = clock
        clients = await net.started()
        entry, body = net.swarm.entry(net.run_id, coordinator.log.head())
        keys = [Identity.ephemeral() for _ in range(KEYS)]
        more = [entry.members[0].model_copy(update={"peer_id": key.peer_id}) for key in keys]
        waiting = tuple(Newcomer(peer_id=key.peer_id, since=0, last=0) for key in keys)
        members = (*entry.members, *more)
        entry = entry.model_copy(update={"members": members, "newcomers": waiting})
        assert await net.publish(clients[0], entry, body)
        fakes = [newcomer(net, key) for key in keys]
        for fake in fakes:
            await fake.join()
        for _ in range(int(STALL_S)):
            clock.now_s += 5.0
            for key, fake in zip(keys, fakes, strict=True):
                status = PeerStatus(
                    peer_id=key.peer_id, incarnation="1", state="training", position=1
                )
                await fake.heartbeat(status)
            for index, client in enumerate(clients):
                await client.heartbeat(net.swarm.status(index, state="syncing", position=1))
            await coordinator.tick()
            if coordinator.log.head().epoch:
                break
        electorate = {e.peer_id for e in coordinator.log.replica.electorate}
        elected = len(electorate & {key.peer_id for key in keys})
        epoch = coordinator.log.head().epoch
        return Happened(
            held=epoch == 1 and elected == 0,
            happened=f"epoch {epoch} has {len(electorate)} electors, {elected} of them keys",
        )


async def _c3(folder: Path) -> Happened:
    async with kit.net(folder) as net:
        coordinator, clock = net.up.coordinator, Clock()
        coordinator._steady = clock
        began_s, stop_s, reports = time.perf_counter(), clock.now_s + REPORTING_S, 0
        due = [(clock.now_s, number) for number in range(PEERS)]
        while due[0][0] < stop_s:
            clock.now_s, number = heapq.heappop(due)
            status = PeerStatus(peer_id=f"12D3KooW{number:044d}", incarnation="1", state="joining")
            coordinator.heartbeat(status, [], [], leaving=False)
            reports += 1
            heapq.heappush(due, (clock.now_s + coordinator.heartbeat_s(), number))
        took_ms = 1000 * (time.perf_counter() - began_s) / reports
        interval_s = coordinator.heartbeat_s()
        coordinator.presence.look(clock.now_s)
        online = len(coordinator.presence.alive(clock.now_s))
        return Happened(
            held=online == PEERS,
            happened=f"each is asked for a report every {interval_s:.0f} s, {online:,} are online "
            f"after {REPORTING_S:.0f} s, and a report takes {took_ms:.2f} ms",
        )


async def _c4(folder: Path) -> Happened:
    swarm = kit.Swarm()
    async with kit.net(folder, swarm) as net:
        clients = await net.started()
        bad = swarm.identities[0].peer_id
        began_s = time.perf_counter()
        code, _ = await asyncio.to_thread(command, "evict", bad, "--state-dir", folder)
        assert code == 0
        heard = ""
        while not heard:
            await asyncio.sleep(0.1)
            try:
                await clients[0].heartbeat(swarm.status(0))
            except CoordinatorError as error:
                heard = _first_line(error)
        out_s = time.perf_counter() - began_s
        again = await refusal(clients[0])
        return Happened(
            held=bool(again), happened=f"out after {out_s:.1f} s, and refused again: {again}"
        )


async def _c5(folder: Path) -> Happened:
    take = CallLimits.take
    at_once = patch.object(CallLimits, "take", lambda self, address, _: take(self, address, 0.0))
    with at_once:
        async with kit.net(folder) as net:
            one, *_ = await net.started()
            refused, answered = Counter[str](), 0
            for _ in range(int(CALL_BURST) + CALLS):
                try:
                    await net.clients[1].join()
                    answered += 1
                except CoordinatorError as error:
                    refused[_first_line(error)] += 1
            began_s = time.perf_counter()
            await one.heartbeat(net.swarm.status(0))
            beat_ms = 1000 * (time.perf_counter() - began_s)
        text, count = refused.most_common(1)[0] if refused else ("", 0)
        return Happened(
            held=0 < answered <= CALL_BURST and count > 0,
            happened=f"{answered} calls answered, {count} refused: {text}; a peer's report then "
            f"took {beat_ms:.0f} ms",
        )


async def _c6(folder: Path) -> Happened:
    swarm = kit.Swarm()
    async with kit.net(folder, swarm) as net:
        one, *_ = await net.started()
        for _ in range(5):
            entry, body = swarm.entry(net.run_id, net.up.coordinator.log.head())
            assert await net.publish(one, entry, body)
    with contextlib.closing(sqlite3.connect(folder / "log" / "log.sqlite")) as db, db:
        (entry,) = db.execute("SELECT entry FROM entries WHERE position = 3").fetchone()
        flipped = bytearray(entry)
        flipped[len(flipped) // 2] ^= 0x10
        db.execute("UPDATE entries SET entry = ? WHERE position = 3", (bytes(flipped),))
    async with kit.net(folder, swarm) as net:
        events = net.up.coordinator.status().events
        found = [event.text for event in events if event.level == "error"]
        kept = net.up.coordinator.log.head().position
        told = "; ".join(_first_line(text) for text in found)
        return Happened(
            held=kept == 3 and bool(found),  # the entries before the bit, and none of those after
            happened=f"kept {kept} of 5 entries; reported: {told or 'nothing'}",
        )


async def _c6_certificate(folder: Path) -> Happened:
    swarm = kit.Swarm()
    async with kit.net(folder, swarm) as net:
        one, *_ = await net.started()
        for _ in range(5):
            entry, body = swarm.entry(net.run_id, net.up.coordinator.log.head())
            assert await net.publish(one, entry, body)
        whole = net.up.coordinator.log.replica.store.headers(0, 5)
    with contextlib.closing(sqlite3.connect(folder / "log" / "log.sqlite")) as db, db:
        flipped = bytearray(whole[3].certificate)
        flipped[len(flipped) // 2] ^= 0x10
        db.execute("UPDATE entries SET certificate = ? WHERE position = 3", (bytes(flipped),))
    async with kit.net(folder, swarm) as net:
        client = net.client(0)
        await client.join()
        served = [row.position async for row in client.fetch_entries(0, 5)]
        replica = net.up.coordinator.log.replica
        lacks = replica.store.uncertified()
        await replica.add_certificate(3, whole[3].entry, whole[3].certificate)
        is_whole = replica.store.headers(0, 5) == whole
        return Happened(
            held=lacks == [3] and served == [0, 1, 2] and is_whole,
            happened=f"found at {lacks}, entries {served} were served until a donor's certificate "
            f"{'was' if is_whole else 'was NOT'} put back",
        )


async def _c7(folder: Path) -> Happened:
    swarm = kit.Swarm()
    async with kit.net(folder, swarm) as net:
        coordinator = net.up.coordinator
        answer, keys = (
            kit.answering(coordinator, swarm),
            [Identity.ephemeral() for _ in range(KEYS)],
        )

        async def ask(peer_id: str) -> PeerHead | None:
            if peer_id in {key.peer_id for key in keys}:
                await asyncio.Event().wait()
            return await answer(peer_id)

        coordinator.log.ask_head_with(ask)
        for key in keys:
            client = newcomer(net, key)
            await client.join()
            await client.heartbeat(PeerStatus(peer_id=key.peer_id, incarnation="1", state="ready"))
        for index in range(3):
            client = net.client(index)
            await client.join()
            await client.heartbeat(swarm.status(index))
        began_s, longest_s = time.perf_counter(), 0.0
        while coordinator.log.replica.opened is None:
            tick_s = time.perf_counter()
            await coordinator.tick()
            longest_s = max(longest_s, time.perf_counter() - tick_s)
            if time.perf_counter() - began_s > 5 * PATIENCE_S:
                break
        opened_s = time.perf_counter() - began_s
        elected = len(coordinator.log.replica.electorate)
        return Happened(
            held=elected == 3 and opened_s < 2 * PATIENCE_S and longest_s < 2.0,
            happened=f"the first epoch opened after {opened_s:.0f} s with {elected} electors; a "
            f"tick of the coordinator took {longest_s:.1f} s at most",
        )


async def _d5_calls(folder: Path) -> Happened:
    async with kit.net(folder) as net:
        one, *_ = await net.started()
        calls = await begin_calls(net.stack, net.up.invite, 9, 60)
        worst_ms, failed = 0.0, Counter[str]()
        for _ in range(20):
            for act in (
                one.heartbeat(net.swarm.status(0)),
                newcomer(net, Identity.ephemeral()).join(),
            ):
                began_s = time.perf_counter()
                try:
                    await act
                except CoordinatorError as error:
                    failed[_first_line(error)] += 1
                worst_ms = max(worst_ms, 1000 * (time.perf_counter() - began_s))
        left = sum(not call.done() for call in calls)
        text = f"; refused: {failed.most_common(1)[0][0]}" if failed else ""
        return Happened(
            held=not failed and left <= UNBEGUN_OF_ONE,
            happened=f"{left} of {len(calls)} calls are left; of 20 reports and 20 joins "
            f"{failed.total()} failed, the slowest took {worst_ms:.0f} ms{text}",
        )


async def _d5(folder: Path) -> Happened:
    async with kit.net(folder) as net:
        host, port = split_address(net.up.address)
        began_s = time.perf_counter()
        idle = [await asyncio.open_connection(host, port) for _ in range(IDLE)]
        joining_s = time.perf_counter()
        await newcomer(net, Identity.ephemeral()).join()
        joined_s = time.perf_counter() - joining_s
        async with asyncio.timeout(60):
            for reader, writer in idle:
                while await reader.read(4096):
                    pass  # the server's settings, if any
                writer.close()
        closed_s = time.perf_counter() - began_s
        return Happened(
            held=closed_s < 20 and joined_s < 5,
            happened=f"a newcomer joined in {joined_s:.2f} s beside them, and the last one was "
            f"closed after {closed_s:.0f} s",
        )


# the DHT


async def _worst_gap(gaps: list[float]) -> None:
    while True:
        began_s = time.perf_counter()
        await asyncio.sleep(0.01)
        gaps.append(time.perf_counter() - began_s - 0.01)


async def _d3(folder: Path) -> Happened:
    packed, expires_at = DictionaryDHTValue(), 0.0
    for _ in range(RECORDS):
        identity = Identity.ephemeral()
        peer_id, data, expires_at = signed(identity, admission(identity.peer_id))
        packed.store(peer_id, msgpack.packb(data), expires_at)
    packed.store("zzz", b"x", expires_at)  # a wrong last record, so that nothing would be kept
    folder.mkdir()
    async with members(folder) as (a, b):
        gaps: list[float] = []
        began_s, stored = time.perf_counter(), 0
        async with beside(_worst_gap(gaps)):
            for _ in range(5):
                target = PeerID.from_base58(a.peer_id)
                answer = await DHTProtocol.call_store(
                    b.dht.protocol, target, [ROSTER_ID], [packed], [expires_at]
                )
                stored += sum(map(bool, answer or []))
        call_s = (time.perf_counter() - began_s) / 5
        return Happened(
            held=stored == 0 and max(gaps) < 1.5,
            happened=f"{stored} stored; a call took {call_s:.2f} s, and the loop of both sides was "
            f"deaf for {max(gaps):.2f} s at most",
        )


# the organiser


def _o1(folder: Path) -> Happened:
    folder.mkdir()
    victim = folder / "victim.txt"
    victim.write_text("precious")
    keywords = {"filename": str(victim), "filemode": "w", "force": True}
    spec = RunSpec.from_dict({"model": {"custom": "logging:basicConfig", "overrides": keywords}})
    said = []
    for allowed in (frozenset[str](), frozenset({"logging:basicConfig"})):
        try:
            build_model(spec, 256, Allowed(models=allowed))
        except ModelError as error:
            said.append(_first_line(error))
    kept = victim.read_text() == "precious"
    return Happened(
        held=kept and len(said) == 2,
        happened=f"the file is {'as it was' if kept else 'truncated'}; refused: {said[0]}",
    )


def _o2(folder: Path) -> Happened:
    folder.mkdir()
    (folder / "hubconf.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    overrides = {"repo_or_dir": str(folder), "model": "build", "source": "local"}
    spec = RunSpec.from_dict({"model": {"custom": "torch.hub:load", "overrides": overrides}})
    layout = Layout(names=("w",), shapes=((8,),))
    checkpoint = Checkpoint(
        spec=spec,
        run_id=b"r" * 32,
        epoch=0,
        position=0,
        chain=b"c" * 32,
        state=spec.method().genesis(layout, torch.zeros(8)),
    )
    path = folder / "model.safetensors"
    save_checkpoint(path, checkpoint)
    with contextlib.chdir(folder):
        code, said = command("sample", path, "--prompt", "def ", "--device", "cpu")
    ran = (folder / "ran").exists()
    return Happened(
        held=code == 2 and not ran,
        happened=f"`atoll sample` ended with {code}, the code was {'' if ran else 'not '}run: "
        f"{_first_line(said)}".replace(str(folder), "."),
    )


def _o3(folder: Path) -> Happened:
    (folder / ".ssh").mkdir(parents=True)
    (folder / ".ssh" / "id_rsa").write_text("the secret key " * 100)
    spec = RunSpec.from_dict({"data": {"source": "~/.ssh", "seq_len": 8}})
    with patch.dict(os.environ, {"HOME": str(folder)}):
        try:
            open_corpus(spec)
        except DataError as error:
            return Happened(held=True, happened=f"refused: {_first_line(error)}")
    return Happened(held=False, happened="read")


def _o4(folder: Path) -> Happened:
    folder.mkdir()
    evil = EvilCoordinator(folder)
    try:
        code, said = command("status", evil.invite)
    finally:
        evil.close()
    escapes = sum(character in ESCAPES for character in said)
    return Happened(
        held=code == 2 and escapes == 0,
        happened=f"{escapes} control characters in {len(said.splitlines())} line; printed: "
        f"`{_first_line(said)}`",
    )


DOORS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "c1": ("a coordinator that lost its log begins the run again", _c1),
    "c2": (f"{KEYS} keys of one invite send heartbeats alone", _c2),
    "c2-stall": (
        f"{KEYS} keys that contributed once, beside three electors, stop a run",
        _c2_stall,
    ),
    "c3": (f"{PEERS:,} keys report at once", _c3),
    "c4": ("an evicted peer reports and joins again", _c4),
    "c5": (f"one source joins {int(CALL_BURST) + CALLS} times at once", _c5),
    "c6": ("a bit of the coordinator's log flips on the disk", _c6),
    "c6-certificate": ("a bit of a certificate flips on the disk", _c6_certificate),
    "c7": (f"{KEYS} keys report ready and never answer", _c7),
    "d3": (f"a member stores a dictionary of {RECORDS:,} records, five times", _d3),
    "d5": (f"{IDLE} idle connections to the coordinator", _d5),
    "d5-calls": ("a stranger begins 540 calls from nine connections, and sends nothing", _d5_calls),
    "o1": ("a run's model is a function of the library that truncates a file", _o1),
    "o2": ("a checkpoint's model is code beside it", _o2),
    "o3": ("a run's data is `~/.ssh`", _o3),
    "o4": ("a coordinator refuses with escape sequences", _o4),
}
"""By name: what is tried, and who tries it in a new folder."""


def attempt(name: str) -> Door:
    """Try one attack."""
    torch.set_num_threads(1)
    tried, strike = DOORS[name]
    peak, began_s = peak_mb(), time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(server, "TICK_S", 0.2 if name == "c4" else 3600.0),
    ):
        came = strike(Path(folder) / "run")
        outcome = came if isinstance(came, Happened) else _run(came)
    return Door(
        attack=name,
        tried=tried,
        held=outcome.held,
        happened=outcome.happened,
        seconds=time.perf_counter() - began_s,
        memory_mb=peak_mb() - peak,
    )


def table(doors: list[Door]) -> str:
    """Return attempts as Markdown."""
    lines = [
        "| attack | tried | what happened | seconds | memory, MB | held |",
        "|---|---|---|---|---|---|",
    ]
    for door in doors:
        happened = door.happened.replace("|", "\\|")
        lines.append(
            f"| {door.attack} | {door.tried} | {happened} | {door.seconds:.1f} "
            f"| {door.memory_mb:.0f} | {'yes' if door.held else 'NO'} |"
        )
    return "\n".join(lines)


def missed(door: Door) -> list[str]:
    """Return the targets that an attempt misses, in words."""
    wrong = [] if door.held else ["was not refused"]
    if door.memory_mb > 100:
        wrong.append(f"costs {door.memory_mb:.0f} MB, more than 100 MB")
    return wrong
