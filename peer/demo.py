"""The demo: a coordinator and peers as processes of their own on this machine.

Nothing here is special to the demo but the supervision: the children are ``atoll coordinator`` and
``atoll peer`` as anyone starts them.  With ``chaos`` one peer is killed (SIGKILL to its process
group, which is what a power cut does to it and its libp2p daemon) while it reduces, loses its log,
and is started again once the others have committed that round.

Errors::

    DemoError (RuntimeError)
     +-- ChildFailed     the coordinator or a peer ended with an error; its output is in the folder
     +-- DemoTimeout     the run did not finish in time
    OutNotEmpty (ValueError)  the folder for the results holds something already
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.coordinator.channel import StatusClient
from atoll.coordinator.client_errors import CoordinatorError
from atoll.coordinator.invite import Invite
from atoll.coordinator.spec import RunSpec, template
from atoll.coordinator.status import RunStatus
from atoll.peer.paths import PeerPaths

INVITE_S = 120.0  # a first start on a busy machine imports torch and makes the model
STOP_S = 20.0
POLL_S = 0.5
RESTART_AFTER = 1  # rounds that the others commit before the killed peer comes back
TAIL_CHARS = 2000

Feed = Callable[[], Awaitable[RunStatus]]
Show = Callable[[Feed], Awaitable[bool]]
"""Shows the run until it has finished; False if the user does not want to see its end."""


class DemoError(RuntimeError):
    """The demo could not be carried through."""


class ChildFailed(DemoError):  # noqa: N818
    """A process of the demo ended with an error."""


class DemoTimeout(DemoError):  # noqa: N818
    """The run did not finish in time."""


class OutNotEmpty(ValueError):  # noqa: N818
    """The folder for the results is in use."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What a demo is asked for."""

    spec: RunSpec
    peers: int
    out: Path
    device: str = "auto"
    chaos: bool = False
    timeout_s: float = 3600.0


@dataclass(kw_only=True)
class Kill:
    """What ``chaos`` did."""

    peer: str
    position: int
    restarted: bool = False


@dataclass(kw_only=True)
class PeerProcess:
    """One peer, over all its starts."""

    name: str
    folder: Path
    process: asyncio.subprocess.Process | None = None
    starts: int = 0
    ready: bool = False
    recoveries: list[str] = field(default_factory=list)
    wire: dict[str, tuple[int, int]] = field(default_factory=dict)
    """bytes sent and received as last reported, by incarnation"""

    @property
    def running(self) -> bool:
        """Whether its process is alive."""
        return self.process is not None and self.process.returncode is None

    @property
    def wire_bytes(self) -> tuple[int, int]:
        """Bytes sent and received over all its starts."""
        sent, received = zip(*self.wire.values(), strict=True) if self.wire else ((0,), (0,))
        return sum(sent), sum(received)


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """What a finished demo leaves for its summary."""

    status: RunStatus
    peers: list[PeerProcess]
    kill: Kill | None
    seconds_to_first_round: float
    seconds: float
    checkpoint: Path
    coordinator_dir: Path


class Demo:
    """Starts the children, watches them, and stops them."""

    def __init__(self, options: DemoOptions, *, say: Callable[[str], None]) -> None:
        """``say`` takes lines for a person."""
        if options.out.exists() and any(options.out.iterdir()):
            raise OutNotEmpty(
                f"{options.out}: expected a new or empty folder, got one with files in it; "
                "choose another with --out"
            )
        self.options = options
        self._say = say
        self._coordinator_dir = options.out / "coordinator"
        self._peers = [
            PeerProcess(name=f"peer-{i}", folder=options.out / f"peer-{i}")
            for i in range(options.peers)
        ]
        self._victim = self._peers[1 % options.peers] if options.chaos else None
        self._kill: Kill | None = None
        self._readers: set[asyncio.Task[None]] = set()
        self._first_round_s: float | None = None
        self._peers_started_s = 0.0
        self._status: RunStatus | None = None
        self._failure: DemoError | None = None

    async def run(self, show: Show) -> DemoRun | None:
        """Carry the demo through; None if the user left before its end.

        Raises:
            DemoError: a child failed, or the run took too long.
        """
        began_s = time.monotonic()
        coordinator = await self._start_coordinator()
        try:
            invite = await self._await_invite(coordinator)
            self._client = StatusClient(Invite.decode(invite))
            self._peers_started_s = time.monotonic()
            for peer in self._peers:
                await self._start_peer(peer)
            if not await self._watch(show):
                return None
        finally:
            await self._stop_all(coordinator)
        return DemoRun(
            status=self._finished_status(),
            peers=self._peers,
            kill=self._kill,
            seconds_to_first_round=self._first_round_s or 0.0,
            seconds=time.monotonic() - began_s,
            checkpoint=self._checkpoint(),
            coordinator_dir=self._coordinator_dir,
        )

    # children

    async def _start_coordinator(self) -> asyncio.subprocess.Process:
        out = self.options.out
        out.mkdir(parents=True, exist_ok=True)
        return await self._spawn(
            "coordinator",
            "coordinator",
            str(self._write_toml()),
            "--state-dir",
            str(self._coordinator_dir),
            "--invite-file",
            str(out / "invite.txt"),
            "--quiet",
        )

    def _write_toml(self) -> Path:
        path = self.options.out / "RUN.toml"
        path.write_text(template(self.options.spec), encoding="utf-8")
        return path

    async def _await_invite(self, coordinator: asyncio.subprocess.Process) -> str:
        path = self.options.out / "invite.txt"
        deadline = time.monotonic() + INVITE_S
        while time.monotonic() < deadline:
            if path.exists():
                return path.read_text(encoding="ascii").strip()
            if coordinator.returncode is not None:
                raise self._failed("coordinator", coordinator.returncode)
            await asyncio.sleep(0.05)
        raise DemoTimeout(f"expected the coordinator's invite within {INVITE_S:.0f} s")

    async def _start_peer(self, peer: PeerProcess) -> None:
        peer.starts += 1
        peer.ready = False
        peer.process = await self._spawn(
            peer.name,
            "peer",
            str(self.options.out / "invite.txt"),
            "--state-dir",
            str(peer.folder),
            "--name",
            peer.name,
            "--device",
            self.options.device,
            "--listen",
            "/ip4/127.0.0.1/tcp/0",
            "--json",
        )
        reader = asyncio.create_task(self._read(peer, peer.process))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

    async def _spawn(self, log_name: str, *arguments: str) -> asyncio.subprocess.Process:
        """A child in a process group of its own, so that it dies with its libp2p daemon."""
        with (self.options.out / f"{log_name}.log").open("ab") as errors:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "atoll.peer.cli",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=os.environ | self._environment(),
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        cores = os.cpu_count() or 1
        threads = max(1, cores // self.options.peers)
        return {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}

    async def _read(self, peer: PeerProcess, process: asyncio.subprocess.Process) -> None:
        if process.stdout is None:
            return
        while line := await process.stdout.readline():
            with suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                self._heed(peer, event["kind"], int(event["position"]), str(event["text"]))

    def _heed(self, peer: PeerProcess, kind: str, position: int, text: str) -> None:
        if kind == "ready":
            peer.ready = True
        elif kind == "event" and text.startswith("recovered"):
            peer.recoveries.append(text)
        elif kind == "phase" and text == "reduce" and peer is self._victim:
            self._strike(peer, position)

    # chaos

    @property
    def _strike_at(self) -> int:
        """The round in which the victim dies: early enough to come back and take part."""
        return max(1, self.options.spec.run.rounds // 3)

    def _strike(self, peer: PeerProcess, position: int) -> None:
        if self._kill is not None or position < self._strike_at or peer.process is None:
            return
        os.killpg(peer.process.pid, signal.SIGKILL)
        self._kill = Kill(peer=peer.name, position=position)
        self._say(f"chaos: {peer.name} killed (SIGKILL) while it reduces round {position + 1}")

    async def _revive_when_due(self, status: RunStatus) -> None:
        kill, victim = self._kill, self._victim
        if kill is None or victim is None or kill.restarted:
            return
        if status.position <= kill.position + RESTART_AFTER or victim.running:
            return
        kill.restarted = True
        shutil.rmtree(PeerPaths(root=victim.folder).log, ignore_errors=True)
        self._say(f"chaos: {victim.name} starts again, without its log")
        await self._start_peer(victim)

    # watching

    async def _feed(self) -> RunStatus:
        status = await self._client.status()
        self._note(status)
        return status

    def _note(self, status: RunStatus) -> None:
        self._status = status
        if status.position >= 1 and self._first_round_s is None:
            self._first_round_s = time.monotonic() - self._peers_started_s
        by_name = {peer.name: peer for peer in self._peers}
        for shown in status.peers:
            peer = by_name.get(shown.name)
            if peer is not None and shown.incarnation:
                peer.wire[shown.incarnation] = (shown.wire_bytes_sent, shown.wire_bytes_received)

    async def _watch(self, show: Show) -> bool:
        """Until the run is finished and all peers have ended; False if the user left."""
        watching = asyncio.create_task(self._supervise())
        showing = asyncio.ensure_future(show(self._feed))
        try:
            await asyncio.wait({watching, showing}, return_when=asyncio.FIRST_COMPLETED)
            if showing.done() and not watching.done() and not showing.result():
                return False
            await watching
            await asyncio.wait_for(showing, STOP_S)
            return True
        finally:
            for task in (watching, showing):
                task.cancel()
            await asyncio.gather(watching, showing, return_exceptions=True)

    async def _supervise(self) -> None:
        deadline = time.monotonic() + self.options.timeout_s
        while time.monotonic() < deadline:
            with suppress(CoordinatorError):
                status = await self._feed()
                await self._revive_when_due(status)
                if status.state == "finished" and not any(p.running for p in self._peers):
                    return
            self._expect_alive()
            await asyncio.sleep(POLL_S)
        raise DemoTimeout(
            f"expected the run to finish within {self.options.timeout_s:.0f} s; "
            f"the logs are in {self.options.out}"
        )

    def _expect_alive(self) -> None:
        for peer in self._peers:
            code = peer.process.returncode if peer.process is not None else None
            killed = self._kill is not None and self._kill.peer == peer.name
            if code not in (None, 0) and not (killed and code == -signal.SIGKILL):
                raise self._failed(peer.name, code)

    def _failed(self, name: str, code: int | None) -> ChildFailed:
        path = self.options.out / f"{name}.log"
        tail = path.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:]
        return ChildFailed(f"{name} ended with exit code {code}:\n{tail}")

    def _finished_status(self) -> RunStatus:
        if self._status is None:
            raise DemoError("expected the coordinator to answer at least once")
        return self._status

    def _checkpoint(self) -> Path:
        found = sorted((self._coordinator_dir / "checkpoints").glob("*.safetensors"))
        if not found:
            raise DemoError(f"expected a checkpoint in {self._coordinator_dir / 'checkpoints'}")
        return found[-1]

    # ending

    async def _stop_all(self, coordinator: asyncio.subprocess.Process) -> None:
        running = [p.process for p in self._peers if p.process is not None and p.running]
        await asyncio.gather(*(_stop(process) for process in running))
        if hasattr(self, "_client"):
            await self._client.close()
        await _stop(coordinator)
        await asyncio.gather(*self._readers, return_exceptions=True)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and SIGKILL to the group of a child that does not heed it."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
