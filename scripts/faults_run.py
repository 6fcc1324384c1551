"""Whole runs for `scripts/bench_faults.py`: `atoll coordinator` and `atoll peer` in the lab.

These are for faults that a group of rounds alone cannot show: those that involve the coordinator,
and those of a peer that joins. All processes are started as a user would start them. The model has
a million parameters, and its step takes a set time. Results come from `atoll status`.

RunScene    a coordinator on the last host of a lab, peers on the others
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil
from allreduce_host import Facts
from faults_cases import PATIENCE_S, Strike
from faults_lab import SceneError, SplitLab

from atoll.coordinator.run.spec import RunSpec, template
from atoll.dht.testing.wan import WanLink

INNER_STEPS = 4
STEP_S = 0.5  # gives a window of two seconds
START_S = 120.0  # for anything that starts a process
EPOCH_S = 240.0  # the coordinator waits 60 s, or three earlier rounds if longer
AN_HOUR_S = 3600.0

MODEL = f"""
import time
from torch import nn
from atoll.peer.training.models import model

class Paced(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 2000)
        self.head = nn.Linear(2000, vocab_size)

    def forward(self, tokens_BT):
        if self.training:
            time.sleep({STEP_S})
        return self.head(self.embedding(tokens_BT))

@model
def build(*, vocab_size, seq_len):
    return Paced(vocab_size)
"""

ATOLL = """
import sys, time
real, ahead_s = time.time, float(sys.argv.pop(1))
time.time = lambda: real() + ahead_s  # as on a machine whose clock is ahead
from atoll.peer.cli.main import main
sys.exit(main(sys.argv[1:]))
"""

WATCH = """
import sys, time
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.peer.cli.watching import look, read_invite
while True:
    try:
        print(look(read_invite(sys.argv[1])).to_json().decode(), flush=True)
    except CoordinatorError as error:
        print(error, file=sys.stderr)
    time.sleep(0.2)
"""


class RunScene:
    """A coordinator, peers that train, and the newest status. Times are seconds since 1970."""

    def __init__(
        self, name: str, links: Sequence[WanLink], params: int, log: IO[bytes], *, nice: int = 0
    ) -> None:
        """One peer per link; the coordinator has a separate link like the first."""
        del name, params, nice
        self.lab = SplitLab([*links, links[0]], congestion="cubic")
        self.log = log
        self.status: Facts = {}
        self.peers: dict[int, subprocess.Popen[bytes]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "RunScene":
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self.lab.__enter__()
        try:
            self._start_coordinator()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            _signal_tree(process, signal.SIGKILL)
            process.wait()
        self.lab.__exit__()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def num_peers(self) -> int:
        """The indices of the peers' hosts, whether or not a peer has started there."""
        return len(self.lab.links) - 1

    def _popen(self, host: int, words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TMPDIR": str(self.folder)}
        process = self.lab.popen(
            host,
            [sys.executable, *words],
            cwd=self.folder,
            stderr=self.log,
            env=os.environ | quiet,
            start_new_session=True,
            **options,
        )
        self._processes.append(process)
        return process

    def _start_coordinator(self) -> None:
        host = self.num_peers
        self._write_inputs(self.lab.ip(host))
        words = ["coordinator", "RUN.toml", "--state-dir", "c", "--invite-file", "invite"]
        self._popen(host, ["-c", ATOLL, "0", *words], stdout=self.log)
        invite = self.folder / "invite"
        if not self.until(invite.exists, START_S):
            raise SceneError("the coordinator did not start; see the log")
        watch = self._popen(host, ["-c", WATCH, "invite"], stdout=subprocess.PIPE)
        threading.Thread(target=self._watch, args=(watch,), daemon=True).start()

    def _watch(self, watch: subprocess.Popen[bytes]) -> None:
        for line in watch.stdout or ():
            self.status = json.loads(line)

    def _write_inputs(self, ip: str) -> None:
        texts = self.folder / "texts"
        texts.mkdir()
        library = Path(sysconfig.get_path("stdlib"))
        for name in ("ast", "argparse", "heapq", "inspect", "random", "socket", "ssl", "typing"):
            shutil.copy(library / f"{name}.py", texts / f"{name}.txt")
        (self.folder / "paced.py").write_text(MODEL)
        spec = RunSpec.from_dict(
            {
                "run": {"name": "faults", "rounds": 10_000},
                "model": {"custom": "paced:build"},
                "data": {"source": str(texts), "seq_len": 32},
                "inner": {"batch_size": 2, "warmup_steps": 2},
                "outer": {"inner_steps": INNER_STEPS},
                "round": {
                    "min_peers": self.num_peers - 1,
                    "snapshot_every": 2,
                },  # one more may join later
                "coordinator": {"listen": f"{ip}:7700", "dht_listen": f"{ip}:7701"},
            }
        )
        (self.folder / "RUN.toml").write_text(template(spec))

    # faults

    def start_peer(self, host: int, *, ahead_s: float = 0.0) -> None:
        """Start the peer of a host, with its clock this many seconds ahead."""
        listen = f"/ip4/{self.lab.ip(host)}/tcp/4001"
        words = ["peer", "invite", "--state-dir", f"p{host}", "--name", f"p{host}"]
        words += ["--yes", "--allow-model", "paced:build", "--data", "texts"]
        self.peers[host] = self._popen(
            host, ["-c", ATOLL, str(ahead_s), *words, "--listen", listen], stdout=self.log
        )

    def begin(self, hosts: Sequence[int]) -> None:
        """Start peers, and wait until all of them take part in a round."""
        for host in hosts:
            self.start_peer(host)
        if self.counted_at(len(hosts), 0) is None:
            raise SceneError("the peers did not complete the undisturbed rounds")

    def kill(self, *hosts: int) -> None:
        """Send SIGKILL to all processes of these hosts at once."""
        for host in hosts:
            _signal_tree(self.peers[host], signal.SIGKILL)

    # observations

    def until(self, condition: Callable[[], Any], timeout_s: float) -> Any:
        """Poll a condition until it returns something; None after the time limit."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if found := condition():
                return found
            time.sleep(0.05)
        return None

    def rounds(self, after: int) -> list[Facts]:
        """Return the rounds beyond a position, oldest first."""
        return [row for row in self.status.get("history", []) if row["position"] > after]

    def position(self) -> int:
        """Return the position of the coordinator's log."""
        return self.status.get("position", 0)

    def counted_at(
        self, members: int, after: int, timeout_s: float = START_S, *, at_most: int = 4096
    ) -> float | None:
        """Return when the first round with this many members was decided beyond a position."""

        def found() -> Facts | None:
            rows = self.rounds(after)
            return next((r for r in rows if members <= r["members"] <= at_most), None)

        row = self.until(found, timeout_s)
        return row["at"] if row else None

    def epoch_at(self, epoch: int) -> float | None:
        """Return when the coordinator's status first showed an epoch; None if it did not."""
        shown = self.until(lambda: self.status.get("epoch", 0) >= epoch, EPOCH_S)
        return self.status["now"] if shown else None

    def state_of(self, host: int) -> Facts:
        """Return a peer as the coordinator shows it; empty if it does not."""
        peers = self.status.get("peers", [])
        return next((p for p in peers if p["name"] == f"p{host}"), {})

    def states_agree(self, hosts: Sequence[int]) -> bool:
        """Return whether all of them come to report the same state digest."""
        told: dict[int, dict[int, str]] = {}

        def all_told() -> dict[int, str] | None:
            for host in hosts:
                peer = self.state_of(host)
                if peer.get("state_digest"):
                    told.setdefault(peer["state_position"], {})[host] = peer["state_digest"]
            return next((one for one in told.values() if len(one) == len(hosts)), None)

        self.until(all_told, PATIENCE_S)
        return any(len(one) == len(hosts) for one in told.values()) and all(
            len(set(one.values())) == 1 for one in told.values()
        )


def _signal_tree(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        for one in [*root.children(recursive=True), root]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)


def most_die_at_once(scene: RunScene) -> Strike:
    """Kill all peers but one; nobody can decide until the coordinator opens an epoch."""
    everyone = range(scene.num_peers)
    scene.begin(everyone)
    survivor, *struck = everyone
    scene.counted_at(len(everyone), scene.position())
    at_s = time.time()
    scene.kill(*struck)
    position = scene.position()
    epoch_at_s = scene.epoch_at(1)
    if epoch_at_s is None:
        return Strike(seconds=None, outcome="the coordinator opened no epoch")
    opened_s = epoch_at_s - at_s
    decided = scene.counted_at(1, position)
    if decided is None:
        return Strike(seconds=None, outcome=f"an epoch after {opened_s:.0f} s, and no round in it")
    base = scene.position()
    for host in struck:
        scene.start_peer(host)
    began_s = time.time()
    again = scene.counted_at(len(everyone), base)
    agree = "the same states" if scene.states_agree(list(everyone)) else "STATES DIFFER"
    return Strike(
        seconds=decided - at_s,
        back_s=again - began_s if again else None,
        outcome=f"no round until the coordinator opens an epoch, after {opened_s:.0f} s; "
        f"peer {survivor} continues alone; after a restart all are counted, {agree}",
    )


def one_after_another(scene: RunScene) -> Strike:
    """Kill a peer as soon as a round without the previous one is decided; then start one."""
    *hosts, joiner = range(scene.num_peers)
    scene.begin(hosts)
    took = []
    for num_dead, host in enumerate(hosts[:-1], start=1):
        left = len(hosts) - num_dead
        at_s, position = time.time(), scene.position()
        scene.kill(host)
        decided = scene.counted_at(left, position, EPOCH_S, at_most=left)
        if decided is None:
            return Strike(seconds=None, outcome=f"no round with {left} members after the kill")
        took.append(decided - at_s)
    base, began_s = scene.position(), time.time()
    scene.start_peer(joiner)
    counted = scene.counted_at(2, base)
    agree = scene.states_agree([hosts[-1], joiner])
    each = ", ".join(f"{seconds:.1f}" for seconds in took)
    epochs = scene.status["epoch"]
    return Strike(
        seconds=max(took),
        back_s=counted - began_s if counted else None,
        outcome=f"{len(hosts)} peers become one, with a round each time after {each} s, {epochs} "
        "new epochs: of two peers only the first is a quorum; a joiner then recovers from it, "
        f"{'the same states' if agree else 'STATES DIFFER'}",
    )


def clock_is_wrong(scene: RunScene) -> Strike:
    """Let a peer whose clock is an hour ahead join those that train."""
    *hosts, late = range(scene.num_peers)
    scene.begin(hosts)
    base, at_s = scene.position(), time.time()
    scene.start_peer(late, ahead_s=AN_HOUR_S)
    counted = scene.counted_at(len(hosts) + 1, base)
    if counted is None:
        return Strike(seconds=None, outcome="it is never counted")
    agree = "the same states" if scene.states_agree([*hosts, late]) else "STATES DIFFER"
    return Strike(
        seconds=counted - at_s,
        outcome=f"it joins, and is counted this long after the start of its process; {agree}",
    )


# hivemind's DHT with a wrong clock

FIRST_NODE = """
import sys, time
from hivemind import DHT
dht = DHT(start=True, host_maddrs=[f"/ip4/{sys.argv[1]}/tcp/4001"])
print(dht.get_visible_maddrs()[0], flush=True)
sys.stdin.readline()
dht.shutdown()
"""

SHIFTED_NODE = """
import sys, time
real = time.time
time.time = lambda: real() + 3600
from hivemind import DHT
try:
    dht = DHT(start=True, host_maddrs=[f"/ip4/{sys.argv[1]}/tcp/4001"], initial_peers=[sys.argv[2]])
    stored = dht.store("run", subkey=sys.argv[1], value=1, expiration_time=time.time() + 60)
    print("joins, and its record is", "taken" if stored else "refused", flush=True)
    dht.shutdown()
except Exception as error:
    print("raises", repr(error)[:150], flush=True)
"""


class TwoNodes:
    """Two hosts of a lab with no processes yet."""

    def __init__(
        self, name: str, links: Sequence[WanLink], params: int, log: IO[bytes], *, nice: int = 0
    ) -> None:
        del name, params, nice
        self.lab, self.log = SplitLab(links[:2], congestion="cubic"), log

    def __enter__(self) -> "TwoNodes":
        self.lab.__enter__()
        self._processes: list[subprocess.Popen[str]] = []
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            _signal_tree(process, signal.SIGKILL)
            process.wait()
        self.lab.__exit__()

    def run(self, host: int, program: str, *words: str) -> subprocess.Popen[str]:
        """Start a program on a host."""
        pipe = subprocess.PIPE
        process = self.lab.popen(
            host,
            [sys.executable, "-c", program, self.lab.ip(host), *words],
            stdin=pipe,
            stdout=pipe,
            stderr=self.log,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process


def hivemind_with_a_wrong_clock(scene: TwoNodes) -> Strike:
    """Let a DHT node whose clock is an hour ahead meet one whose clock is right."""
    address = scene.run(0, FIRST_NODE).stdout.readline().strip()
    said: list[str] = []
    shifted = scene.run(1, SHIFTED_NODE, address)
    reader = threading.Thread(target=lambda: said.append(shifted.stdout.readline()), daemon=True)
    reader.start()
    reader.join(PATIENCE_S)
    outcome = said[0].strip() if said else f"prints nothing for {PATIENCE_S:.0f} s"
    return Strike(seconds=None, outcome=f"its DHT node {outcome}")
