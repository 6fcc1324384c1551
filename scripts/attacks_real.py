"""The attacks of `scripts/bench_attacks.py` on real processes: a coordinator and four peers.

All run on loopback with `atoll coordinator` and `atoll peer`, and a model whose step takes as long
as a file says. A member that attacks is one of the four; a stranger is a fifth process. Rounds and
members are those of the coordinator's status (`atoll status --json`). Memory is the peak of a
process and its p2pd in a phase (VmHWM, which is reset before each).
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from attacks_rows import Phase, Progress, Row, row_of

from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.spec import RunSpec, template
from atoll.coordinator.run.status import RoundSummary, RunStatus
from atoll.peer.cli.watching import look

ATTACKER = ["-m", "support.real_attacks"]
ATOLL = ["-c", "import sys; from atoll.peer.cli.main import main; sys.exit(main(sys.argv[1:]))"]

STEP_S, INNER_STEPS = 1.0, 2  # windows of 2 s
STALL_S, GRACE_S = 1.5, 3.0
DEADLINE_S = 4 * GRACE_S + 14 * STALL_S  # of a member with one leader, as in memory
PHASE_S = 60.0
MEMBER_PHASE_S = 120.0  # of an attack by a member: its longest rounds take most of a minute
LOOK_S = 0.5
START_S = 120.0
STOP_S = 20.0
NAMES = ("ann", "ben", "cas", "dan")  # the last may be the attacker

T = TypeVar("T")

MODEL = """
import time
from pathlib import Path
from torch import nn
from atoll.peer.training.models import model

class Paced(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 300)
        self.head = nn.Linear(300, vocab_size)

    def forward(self, tokens_BT):
        if self.training:
            time.sleep(float(Path("pace").read_text()))
        return self.head(self.embedding(tokens_BT))

@model
def build(*, vocab_size, seq_len):
    return Paced(vocab_size)
"""


@dataclass(frozen=True, kw_only=True)
class RealAttack:
    """An attack by a process of `tests/support/real_attacks.py`."""

    what: str
    stranger: bool


NONE = "none"
ATTACKS = {
    NONE: RealAttack(what="no attack", stranger=True),  # what the phases scatter by
    "p3": RealAttack(what="a leader never closes the group", stranger=False),
    "p5": RealAttack(
        what="a member declares no uplink, and sends signs of life alone", stranger=False
    ),
    "d1": RealAttack(what="a stranger takes the places next to the roster's key", stranger=True),
    "d2": RealAttack(what="a stranger stores records without an admission", stranger=True),
    "d4": RealAttack(what="strangers open 7,500 silent streams every 9 s", stranger=True),
}


class Process:
    """A process of a run, with its lines of JSON."""

    def __init__(self, folder: Path, name: str, arguments: Sequence[str]) -> None:
        self.name, self.said = name, list[dict[str, Any]]()
        self._log = (folder / f"{name}.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                self.said.append(json.loads(line))

    def expect_alive(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self._process.returncode}")

    def _tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def yield_processor(self) -> None:
        """Take only the time that others leave: a stranger computes on a machine of its own."""
        for process in self._tree():
            process.nice(19)

    def reset_peak(self) -> None:
        """Let the peak be what is held now."""
        for process in self._tree():
            with contextlib.suppress(OSError):
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peak_mb(self) -> float:
        """Return the peak memory of the process and its p2pd, since the last reset."""
        return sum(_high_mark_mb(process.pid) for process in self._tree())

    def stop(self) -> None:
        """End the process, and what it started."""
        tree = self._tree()
        if self._process.poll() is None:
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._log.close()


def _high_mark_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


def until(condition: Callable[[], T | None], what: str) -> T:
    """Poll until the condition gives something true, and return that."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if found := condition():
            return found
        time.sleep(LOOK_S)
    raise RuntimeError(f"expected {what} within {START_S:.0f} s")


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


class RealRun:
    """A coordinator and its peers."""

    def __init__(self, folder: Path, attacker: str) -> None:
        """Prepare a run; with an attack by a member, the last peer is that member."""
        self._folder, self._attacker = folder, attacker
        self._switch = folder / "attack"
        self._ports = {name: free_port() for name in NAMES}
        self._peers: dict[str, Process] = {}
        self._coordinator: Process | None = None
        self._stranger: Process | None = None
        self._write_inputs()

    def _write_inputs(self) -> None:
        texts = self._folder / "texts"
        texts.mkdir()
        library = Path(sysconfig.get_path("stdlib"))
        for name in ("ast", "argparse", "heapq", "inspect", "random", "socket", "ssl", "typing"):
            shutil.copy(library / f"{name}.py", texts / f"{name}.txt")
        (self._folder / "paced.py").write_text(MODEL)
        (self._folder / "pace").write_text(str(STEP_S))
        sections = {
            "run": {"name": "attacked", "rounds": 0},
            "model": {"custom": "paced:build"},
            "data": {"source": str(texts), "seq_len": 32},
            "inner": {"batch_size": 2, "warmup_steps": 2},
            "outer": {"inner_steps": INNER_STEPS},
            "round": {"min_peers": len(NAMES), "stall_s": STALL_S, "grace_s": GRACE_S},
            "coordinator": {"listen": "127.0.0.1:0", "dht_listen": "127.0.0.1:0"},
        }
        (self._folder / "RUN.toml").write_text(template(RunSpec.from_dict(sections)))

    def start(self) -> None:
        """Start all, and wait for a few rounds."""
        words = ["coordinator", "RUN.toml", "--state-dir", "coordinator", "--json", "--quiet"]
        coordinator = Process(self._folder, "coordinator", [*ATOLL, *words])
        self._coordinator = coordinator
        told = until(
            lambda: next((e for e in coordinator.said if "invite" in e), None), "an invite"
        )
        self.invite = Invite.decode(told["invite"])
        for name in NAMES:
            lies = name == NAMES[-1] and self._attacker and not ATTACKS[self._attacker].stranger
            liar = [*ATTACKER, "member", self._attacker, str(self._switch)]
            words = [*(liar if lies else ATOLL), "peer", told["invite"], "--state-dir", name]
            words += ["--name", name, "--listen", f"/ip4/127.0.0.1/tcp/{self._ports[name]}"]
            words += ["--json", "--yes", "--allow-model", "paced:build", "--data", "texts"]
            self._peers[name] = Process(self._folder, name, words)
        until(lambda: self.position() >= 5, "five rounds")

    def status(self) -> RunStatus | None:
        """Return the status, if the coordinator answers."""
        with contextlib.suppress(CoordinatorError):
            return look(self.invite)
        return None

    def position(self) -> int:
        """Return how many rounds the coordinator knows of."""
        for process in self._processes():
            process.expect_alive()
        status = self.status()
        return status.position if status is not None else 0

    def _processes(self) -> list[Process]:
        started = [self._coordinator, *self._peers.values()]
        return [process for process in started if process is not None]

    def begin_attack(self) -> None:
        """Let the member lie, or start the stranger."""
        if self._attacker == NONE:
            return
        if not ATTACKS[self._attacker].stranger:
            self._switch.touch()
            return
        addresses = [*self.invite.bootstrap[:1], self.address_of(NAMES[0])]
        words = [*ATTACKER, "stranger", self._attacker, self.invite.run_id.hex(), *addresses]
        self._stranger = Process(self._folder, "stranger", words)
        self._stranger.yield_processor()

    def end_attack(self) -> str:
        """End what was begun; return what a stranger met."""
        self._switch.unlink(missing_ok=True)
        if self._stranger is None:
            return ""
        self._stranger.expect_alive()
        self._stranger.stop()
        met = self._stranger.said[-1] if self._stranger.said else {}
        return ", ".join(f"{count:,} {what}" for what, count in met.items())

    def address_of(self, name: str) -> str:
        """Return the multiaddr of a peer."""
        return f"/ip4/127.0.0.1/tcp/{self._ports[name]}/p2p/{self.peer_id(name)}"

    def peer_id(self, name: str) -> str:
        status = self.status()
        assert status is not None
        return next(peer.peer_id for peer in status.peers if peer.name == name)

    def phase(self, seconds: float) -> tuple[Phase, dict[str, float]]:
        """Watch for so long; return the rounds, and the peak memory of each honest process."""
        honest = [p for p in self._processes() if p.name != NAMES[-1]]
        for process in honest:
            process.reset_peak()
        at = self.position()
        progress = Progress(began_s=time.monotonic(), first=at)
        while time.monotonic() < progress.began_s + seconds:
            time.sleep(LOOK_S)
            at = max(at, self.position())
            progress.note(time.monotonic(), at)
        return progress.phase(), {p.name: p.peak_mb() for p in honest}

    def stop(self) -> None:
        """End all processes."""
        for process in [self._stranger, *reversed(self._processes())]:
            if process is not None:
                process.stop()


def left_out_since_s(
    history: Sequence[RoundSummary], peer_id: str, began_at: float
) -> float | None:
    """Return how long after a time all rounds were without a peer; None: not even the last one."""
    since: float | None = None
    for row in history:
        if row.at < began_at:
            continue
        if peer_id not in row.left_out:
            since = None
        elif since is None:
            since = row.at - began_at
    return since


def measure(name: str) -> Row:
    """Run one attack, from a time without it to a time after it."""
    attack = ATTACKS[name]
    with tempfile.TemporaryDirectory() as folder:
        run = RealRun(Path(folder), name)
        try:
            run.start()
            liar = run.peer_id(NAMES[-1])
            before, held = run.phase(PHASE_S)
            first = run.status()
            began_at = time.time()
            run.begin_attack()
            during, holds = run.phase(PHASE_S if attack.stranger else MEMBER_PHASE_S)
            last = run.status()
            met = run.end_attack()
            after, _ = run.phase(PHASE_S)
        finally:
            run.stop()
    assert first is not None and last is not None
    epochs = last.epoch - first.epoch
    return row_of(
        name,
        attack.what,
        [before, during, after],
        stranger=attack.stranger,
        deadline_s=DEADLINE_S,
        memory_mb=max(holds[who] - held[who] for who in held),
        out_s=None if attack.stranger else left_out_since_s(last.history, liar, began_at),
        saw=met or f"{epochs} new epochs",
    )
