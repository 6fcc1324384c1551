"""The demo: a coordinator and peers as separate processes on this machine.

The children are ordinary `atoll coordinator` and `atoll peer` processes; only their supervision is
special. With `chaos`, one peer is killed while it reduces, by SIGKILL to its process group, which
has the effect of a power cut on it and its libp2p daemon. It loses its log and restarts once the
others have committed that round. In a pipeline it comes back to its stage; if it is alone there,
the others wait for it, so it restarts after some seconds.

If a child ends early, the demo ends within a second or two. However the demo ends, its children end
with it.

Errors, in addition to those of `atoll.peer.lab.children`:

    DemoError (RuntimeError)    the demo failed
     +-- DemoStuck              the run made no progress for too long
    OutError (ValueError)       the folder for the results is not empty or cannot be created
    ChaosError (ValueError)     too few peers or rounds to kill a peer and restart it
    ShareError (ValueError)     a fraction of the time outside (0, 1]
    StagesError (ValueError)    too few peers for the stages, or a comparison that they rule out
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from atoll.coordinator.report.view import is_gone
from atoll.coordinator.rpc.channel import StatusClient
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.phases import RoundPhase
from atoll.coordinator.run.spec import RunSpec, template
from atoll.coordinator.run.status import FlowStatus, RunStatus
from atoll.dht.tasks import end
from atoll.peer.lab.children import ATOLL, Child
from atoll.peer.paths import PeerPaths

INVITE_S = 120.0  # a first start on a busy machine imports torch and makes the model
SHOWN_S = 20.0  # for the display to notice that the run has finished
POLL_S = 0.5  # well below a window, which takes seconds
SILENT_S = 60.0  # a running coordinator that answers nothing for so long is broken
LONE_WINDOWS = 5  # windows of training without a round that still count as progress
STUCK_S = 300.0  # five times the wait of a run without a quorum for its next epoch
RESTART_AFTER = 1  # rounds that the others commit before the killed peer restarts
VACANT_S = 3.0  # that a stage without peers stays so: long enough to be seen
MEMBER_AFTER = 2  # further rounds that it needs to be a member again, as it may miss one

Feed = Callable[[], Awaitable[RunStatus]]
Show = Callable[[Feed], Awaitable[bool]]
"""Shows the run until it has finished; returns False if the user quits earlier."""


class DemoError(RuntimeError):
    """The demo failed."""


class DemoStuck(DemoError):
    """The run made no progress for too long."""


class OutError(ValueError):
    """The folder for the results cannot be used."""


class ChaosError(ValueError):
    """The run has too few peers or rounds to kill a peer and restart it."""


class ShareError(ValueError):
    """A fraction of the time is outside (0, 1]."""


class StagesError(ValueError):
    """The demo cannot have so many stages."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of a demo."""

    spec: RunSpec
    peers: int
    out: Path
    device: str = "auto"
    chaos: bool = False
    shares: Sequence[float] = (1.0,)
    """Fraction of time that each peer trains, repeated to cover all peers."""
    program: Sequence[str] = ATOLL
    """Command that starts a child, before its arguments."""

    def __post_init__(self) -> None:
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise ShareError(f"expected shares above 0 and at most 1, got {self.shares}")
        if self.chaos:
            expect_room_for_chaos(self.peers, self.spec.run.rounds)


def own_names(spec: RunSpec) -> list[str]:
    """Return the arguments by which a peer agrees to its own demo's spec."""
    arguments = ["--yes", "--data", spec.data.source, "--tokenizer", spec.data.tokenizer]
    if spec.model.custom is not None:
        arguments += ["--allow-model", spec.model.custom]
    return arguments


def make_out(folder: Path) -> None:
    """Create the folder for the results.

    Raises:
        OutError: the folder is not empty or cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = "one with files in it" if any(folder.iterdir()) else ""
    except OSError as error:
        found = error.strerror or repr(error)
    if found:
        raise OutError(
            f"{folder}: expected a new or empty folder, got {found}; choose another with --out"
        )


def strike_at(rounds: int) -> int:
    """Return the position at which `chaos` kills a peer, early enough for it to rejoin."""
    return max(1, rounds // 3)


def expect_room_for_chaos(peers: int, rounds: int) -> None:
    """Raise ChaosError if a killed peer could not rejoin before the run ends."""
    if peers < 2:
        raise ChaosError(
            "--chaos kills one peer while the others continue: expected at least 2 peers, got 1; "
            "increase --peers"
        )
    needed = strike_at(rounds) + 1 + RESTART_AFTER + MEMBER_AFTER
    if rounds < needed:
        raise ChaosError(
            f"--chaos kills a peer in round {strike_at(rounds) + 1} and restarts it "
            f"{1 + RESTART_AFTER} rounds later: expected at least {needed} rounds, got {rounds}; "
            "increase --rounds"
        )


@dataclass(kw_only=True)
class Kill:
    """The peer that `chaos` killed, and when."""

    peer: str
    position: int
    at_s: float
    """Time of the monotonic clock."""
    restarted: bool = False


@dataclass(kw_only=True)
class PeerProcess:
    """One peer, across restarts."""

    name: str
    folder: Path
    share: float = 1.0
    """Fraction of time to train."""
    child: Child | None = None
    wire: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes sent and received by incarnation, as last reported."""
    flows: dict[str, FlowStatus] = field(default_factory=dict)
    """In a pipeline, what has flowed through it by incarnation, as last reported."""

    @property
    def running(self) -> bool:
        """Return whether its process is alive."""
        return self.child is not None and self.child.running

    @property
    def wire_bytes(self) -> tuple[int, int]:
        """Bytes sent and received, across restarts."""
        sent, received = zip(*self.wire.values(), strict=True) if self.wire else ((0,), (0,))
        return sum(sent), sum(received)


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """Results of a finished demo, from which its summary is made."""

    status: RunStatus
    peers: list[PeerProcess]
    kill: Kill | None
    seconds_to_first_round: float
    seconds: float
    checkpoints: Mapping[str, Path]
    """The last one of each module of the run."""
    coordinator_dir: Path

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of a dense run; of a pipeline that of the last stage."""
        return list(self.checkpoints.values())[-1]


class Demo:
    """Starts the children, watches them, and stops them."""

    def __init__(self, options: DemoOptions, *, say: Callable[[str], None]) -> None:
        """Create the folder for the results.

        Args:
            options: options of the demo.
            say: prints a line for the user.

        Raises:
            ChaosError, ShareError, OutError: the options or the folder cannot be used.
        """
        make_out(options.out)
        self.options = options
        self._say = say
        self._coordinator_dir = options.out / "coordinator"
        self._coordinator: Child | None = None
        self._peers = [
            PeerProcess(name=f"peer-{i}", folder=options.out / f"peer-{i}", share=share)
            for i, share in zip(range(options.peers), cycle(options.shares), strict=False)
        ]
        self._victim = self._peers[1] if options.chaos else None
        self._kill: Kill | None = None
        self._first_round_s: float | None = None
        self._peers_started_s = 0.0
        self._client: StatusClient | None = None
        self._status: RunStatus | None = None

    async def run(self, show: Show) -> DemoRun | None:
        """Run the demo; return None if the user quits before its end.

        No child remains afterwards, even if this is cancelled.

        Raises:
            ChildFailed: a process ended before the run did.
            ChildRefused: a process rejected its input.
            DemoStuck: the run made no progress for too long.
        """
        began_s = time.monotonic()
        try:
            invite = await self._start_coordinator()
            self._client = StatusClient(Invite.decode(invite))
            self._peers_started_s = time.monotonic()
            for peer in self._peers:
                await self._start_peer(peer)
            if not await self._watch(show):
                return None
        finally:
            await self._stop_all()
        return DemoRun(
            status=self._finished_status(),
            peers=self._peers,
            kill=self._kill,
            seconds_to_first_round=self._first_round_s or 0.0,
            seconds=time.monotonic() - began_s,
            checkpoints={name: self._checkpoint(name) for name in self.options.spec.modules},
            coordinator_dir=self._coordinator_dir,
        )

    def kill(self) -> None:
        """Kill all children at once, which also ends `run`."""
        for child in self._children():
            child.kill()

    # children

    def _children(self) -> Iterator[Child]:
        yield from (peer.child for peer in self._peers if peer.child is not None)
        if self._coordinator is not None:
            yield self._coordinator

    async def _start_coordinator(self) -> str:
        out = self.options.out
        spec, invite = out / "RUN.toml", out / "invite.txt"
        spec.write_text(template(self.options.spec), encoding="utf-8")
        self._coordinator = await self._start(
            "coordinator",
            str(spec),
            "--state-dir",
            str(self._coordinator_dir),
            "--invite-file",
            str(invite),
            "--quiet",
        )
        deadline = time.monotonic() + INVITE_S
        while not invite.exists():
            self._expect_coordinator()
            if time.monotonic() > deadline:
                raise DemoStuck(
                    f"the coordinator wrote no invite within {INVITE_S:.0f} s; see coordinator.log"
                )
            await asyncio.sleep(0.05)
        return invite.read_text(encoding="ascii").strip()

    async def _start_peer(self, peer: PeerProcess) -> None:
        peer.child = await self._start(
            peer.name,
            str(self.options.out / "invite.txt"),
            "--state-dir",
            str(peer.folder),
            "--name",
            peer.name,
            "--device",
            self.options.device,
            "--share",
            str(peer.share),
            "--listen",
            "/ip4/127.0.0.1/tcp/0",
            "--json",
            *own_names(self.options.spec),
            on_line=lambda line: self._read(peer, line),
        )

    async def _start(
        self, name: str, *arguments: str, on_line: Callable[[bytes], None] = lambda line: None
    ) -> Child:
        command = "coordinator" if name == "coordinator" else "peer"
        threads = max(1, (os.cpu_count() or 1) // self.options.peers)
        return await Child.start(
            name,
            self.options.out / f"{name}.log",
            [command, *arguments, "--stop-with-stdin"],
            on_line=on_line,
            program=self.options.program,
            environment={"OMP_NUM_THREADS": str(threads)},
        )

    def _read(self, peer: PeerProcess, line: bytes) -> None:
        with suppress(ValueError, KeyError, TypeError):
            event = json.loads(line)
            reducing = event["kind"] == "phase" and event["phase"] == RoundPhase.REDUCE
            if reducing and peer is self._victim:
                self._strike(peer, int(event["position"]))

    # chaos

    def _strike(self, peer: PeerProcess, position: int) -> None:
        first = strike_at(self.options.spec.run.rounds)
        if self._kill is not None or position < first or peer.child is None:
            return
        peer.child.kill()
        self._kill = Kill(peer=peer.name, position=position, at_s=time.monotonic())
        self._say(f"chaos: {peer.name} killed (SIGKILL) while it reduces round {position + 1}")

    async def _revive_when_due(self, status: RunStatus) -> None:
        kill, victim = self._kill, self._victim
        if kill is None or victim is None or kill.restarted:
            return
        module = module_of(status, victim.name)
        if victim.running or not is_restart_due(status, kill, module, time.monotonic()):
            return
        shutil.rmtree(PeerPaths(root=victim.folder).log(module), ignore_errors=True)
        self._say(f"chaos: restarting {victim.name} without its log")
        await self._start_peer(victim)
        kill.restarted = True

    # watching

    async def _feed(self) -> RunStatus:
        if self._client is None:
            raise RuntimeError("the coordinator has not been started")
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
            if peer is not None and shown.flow is not None:
                peer.flows[shown.incarnation] = shown.flow

    async def _watch(self, show: Show) -> bool:
        """Wait until the run is finished and all peers have ended; False if the user quits."""
        watching = asyncio.create_task(self._supervise())
        showing = asyncio.ensure_future(show(self._feed))
        try:
            await asyncio.wait({watching, showing}, return_when=asyncio.FIRST_COMPLETED)
            if showing.done() and not watching.done():
                if not showing.result():
                    return False
                self._say("training finished; stopping peers")
            await watching
            await asyncio.wait_for(showing, SHOWN_S)
            return True
        finally:
            # The failure that counts has been raised above; the other one follows from it.
            await end(watching, showing, expected=(Exception,))

    async def _supervise(self) -> None:
        spec = self.options.spec
        window_tokens = self.options.peers * spec.outer.longest * spec.step_tokens
        watch = StallWatch(time.monotonic(), window_tokens=window_tokens)
        while True:
            ended = [peer for peer in self._peers if self._has_ended(peer)]
            self._expect_coordinator()
            status = None
            with suppress(CoordinatorError):
                status = await self._feed()
                await self._revive_when_due(status)
            watch.note(status, time.monotonic())
            finished = status is not None and status.state == "finished"
            for peer in ended:  # only a finished run lets a peer end, and then with exit code 0
                in_time = finished or status is None
                if peer.child is not None and not (in_time and peer.child.exit_code == 0):
                    raise peer.child.failure()
            if finished and len(ended) == len(self._peers):
                return
            await asyncio.sleep(POLL_S)

    def _has_ended(self, peer: PeerProcess) -> bool:
        dead = self._kill is not None and not self._kill.restarted
        return not peer.running and not (dead and peer is self._victim)

    def _expect_coordinator(self) -> None:
        if self._coordinator is not None and not self._coordinator.running:
            raise self._coordinator.failure()

    def _finished_status(self) -> RunStatus:
        if self._status is None:
            raise DemoError("the coordinator never answered")
        return self._status

    def _checkpoint(self, module: str) -> Path:
        folder = self._coordinator_dir / "checkpoints" / module
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise DemoError(f"no checkpoint in {folder}")
        return found[-1]

    async def _stop_all(self) -> None:
        # The peers first, because they leave the run through the coordinator.
        peers = [peer.child for peer in self._peers if peer.child is not None]
        # One that fails to stop must not leave the others running.
        ended = await asyncio.gather(*(child.stop() for child in peers), return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        if self._coordinator is not None:
            await self._coordinator.stop()
        for failure in filter(None, ended):
            raise failure


def module_of(status: RunStatus, name: str) -> str:
    """Return the module that the peer of a name serves; that of a dense run if it is unknown."""
    return next((peer.module for peer in status.peers if peer.name == name), "")


def is_restart_due(status: RunStatus, kill: Kill, module: str, now_s: float) -> bool:
    """Return whether a killed peer shall come back.

    Args:
        status: of the run.
        kill: of the peer.
        module: that it served.
        now_s: time of the monotonic clock.
    """
    others = [p for p in status.peers if p.module == module and p.name != kill.peer]
    if module and all(map(is_gone, others)):  # nobody else moves this stage
        return now_s - kill.at_s > VACANT_S
    position = next((m.position for m in status.modules if m.name == module), status.position)
    return position > kill.position + RESTART_AFTER


class StallWatch:
    """Detects a run that makes no progress.

    A committed round, a new peer and training are progress, but training without rounds counts for
    only `LONE_WINDOWS` windows, after which a round should have been committed.
    """

    def __init__(self, now_s: float, *, window_tokens: int) -> None:
        """Start to watch.

        Args:
            now_s: time of any monotonic clock.
            window_tokens: tokens of all peers in one window.
        """
        self._answered_s = self._moved_s = now_s
        self._patience_tokens = LONE_WINDOWS * window_tokens
        self._trained_before = 0
        self._progress = (0, 0, 0)

    def note(self, status: RunStatus | None, now_s: float) -> None:
        """Record the status of the run; None if the coordinator did not answer.

        Raises:
            DemoStuck: there was no answer or no progress for too long.
        """
        if status is not None:
            self._answered_s = now_s
            self._note_progress(status, now_s)
        if now_s - self._answered_s > SILENT_S:
            raise DemoStuck(
                f"the coordinator runs but has not answered for {SILENT_S:.0f} s; "
                "see coordinator.log"
            )
        if now_s - self._moved_s > STUCK_S:
            raise DemoStuck(
                f"no progress for {STUCK_S:.0f} s after round {self._progress[0]}; "
                "see the peers' logs"
            )

    def _note_progress(self, status: RunStatus, now_s: float) -> None:
        trained = sum(peer.tokens_total for peer in status.peers)
        if status.position != self._progress[0]:
            self._trained_before = trained
        counted = min(trained, self._trained_before + self._patience_tokens)
        progress = (status.position, len(status.peers), counted)
        if progress != self._progress:
            self._progress, self._moved_s = progress, now_s
