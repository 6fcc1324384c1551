"""A run of processes as people start them: a coordinator and three peers, killed and stopped.

One run serves the tests of this file; each leaves the coordinator and three peers training.  Its
model is tiny, and a step takes as long as a file says: so the run goes on at its own pace while a
busy machine starts a process, and needs next to no arithmetic.
"""

import collections
import contextlib
import itertools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sysconfig
import threading
import time
from pathlib import Path

import pytest

from atoll.coordinator.checkpoints import load_checkpoint
from atoll.coordinator.policies import STALL_S
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.spec import RunSpec, template
from atoll.dht.identity import Identity
from atoll.optim.log.entry import Entry
from atoll.optim.log.store import LOG_FILE, LogStore
from atoll.peer.cli.watching import look
from atoll.peer.paths import PeerPaths
from support.forks import Forked
from support.limits import DEADLINE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDS = 72
INNER_STEPS = 2
STEP_S = 1.0
STOP_S = 10.0
GRACE_S = 8.0
STRIKE_AT = 6  # by then a snapshot is cheaper to fetch than all updates

MODEL = """
import time
from pathlib import Path
from torch import nn
from atoll.peer.training.models import model

WIDTH = 1000  # 500k parameters: a round takes long enough to be killed in

class Paced(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size)

    def forward(self, tokens_BT):
        if self.training:
            time.sleep(float(Path("pace").read_text()))
        return self.head(self.embedding(tokens_BT))

@model
def build(*, vocab_size, seq_len):
    return Paced(vocab_size)
"""


def until(condition, what, timeout_s=DEADLINE_S):
    """Poll until the condition gives something true, and return that."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(CoordinatorError):  # a busy machine may be late with an answer
            if found := condition():
                return found
        time.sleep(0.5)  # a look connects anew each time
    raise AssertionError(f"expected {what} within {timeout_s:.0f} s")


class Child:
    """`atoll ...` with its exit code, and its lines of JSON as `events`."""

    def __init__(self, folder, name, *arguments):
        self.name, self.log = name, folder / f"{name}.log"
        self.events = []
        self.heed = lambda event: None  # called with each event, in the reader's thread
        with self.log.open("a") as log:
            self._process = Forked(*arguments, stdout=subprocess.PIPE, stderr=log, cwd=folder)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self._process.stdout as lines:
            for line in lines:
                event = json.loads(line)
                self.heed(event)
                self.events.append(event)

    def told_invite(self):
        return self.alive() and next((e["invite"] for e in self.events if "invite" in e), None)

    def said(self, text, kind="event"):
        return next((e for e in self.events if e["kind"] == kind and text in e["text"]), None)

    def await_said(self, text, kind="event", timeout_s=DEADLINE_S):
        return until(lambda: self.alive() and self.said(text, kind), f"{self.name}: {text}")

    def alive(self):
        if self._process.poll() is None:
            return True
        raise AssertionError(f"{self.name} ended:\n{self.log.read_text()[-3000:]}")

    def kill(self):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        return self.wait()

    def freeze(self):
        os.killpg(self._process.pid, signal.SIGSTOP)

    def thaw(self):
        os.killpg(self._process.pid, signal.SIGCONT)

    def interrupt(self):
        self._process.send_signal(signal.SIGINT)

    def terminate(self):
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self, timeout_s=STOP_S):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.poll()


class Run:
    """A folder with a run in it."""

    def __init__(self, folder):
        self.folder = folder
        self.peers = {}
        self.coordinator = None
        self.invite = ""
        self.write_inputs()
        self.set_pace(STEP_S)

    def write_inputs(self):
        texts = self.folder / "texts"
        texts.mkdir()
        library = Path(sysconfig.get_path("stdlib"))
        for name in ("ast", "argparse", "heapq", "inspect", "random", "socket", "ssl", "typing"):
            shutil.copy(library / f"{name}.py", texts / f"{name}.txt")
        (self.folder / "paced.py").write_text(MODEL)
        spec = RunSpec.from_dict(
            {
                "run": {"name": "paced", "rounds": ROUNDS},
                "model": {"custom": "paced:build"},
                "data": {"source": str(texts), "seq_len": 32},
                "inner": {"batch_size": 2, "warmup_steps": 2},
                "outer": {"inner_steps": INNER_STEPS},
                "round": {
                    "min_peers": 3,
                    "stall_s": 3.0,
                    "grace_s": GRACE_S,
                    "snapshot_every": 2,
                },
                "compression": {"codec": "fp16"},  # a snapshot costs as much as four updates
                "coordinator": {"listen": "127.0.0.1:0", "dht_listen": "127.0.0.1:0"},
            }
        )
        (self.folder / "RUN.toml").write_text(template(spec))

    def set_pace(self, step_s):
        partial = self.folder / "pace.new"
        partial.write_text(str(step_s))
        partial.replace(self.folder / "pace")

    # processes

    def start_coordinator(self):
        self.coordinator = Child(
            self.folder, "coordinator", "coordinator", "RUN.toml", "--state-dir", "coordinator",
            "--json", "--quiet",
        )  # fmt: skip
        return until(self.coordinator.told_invite, "an invite")

    def start_peer(self, name):
        self.peers[name] = Child(
            self.folder, name, "peer", self.invite, "--state-dir", name,
            "--name", name, "--listen", "/ip4/127.0.0.1/tcp/0", "--json",
            "--yes", "--allow-model", "paced:build", "--data", "texts",
        )  # fmt: skip
        return self.peers[name]

    def close(self):
        for child in [*self.peers.values(), self.coordinator]:
            if child is not None:
                child.kill()

    # what is seen from outside

    def status(self):
        return look(Invite.decode(self.invite))

    def try_status(self):
        with contextlib.suppress(CoordinatorError):
            return self.status()

    def shown(self, name):
        """A peer as the coordinator shows it."""
        status = self.try_status()
        return next((p for p in status.peers if p.name == name), None) if status else None

    def peer_id(self, name):
        return Identity.load_or_create(self.paths(name).identity).peer_id

    def paths(self, name):
        return PeerPaths(root=self.folder / name)

    def position(self, name):
        """The furthest position that a running peer has told of."""
        return max((e["position"] for e in self.peers[name].events), default=0)

    def head_on_disk(self, name):
        """The position that a dead peer's log ends at."""
        return self.read_log(self.paths(name).log())[-1].position + 1

    def members_since(self, position):
        """How many took part in the newest round, if that is later than a position."""
        newest = self.status().history[-1:]
        return newest[0].members if newest and newest[0].position > position else 0

    def expect_equal_states(self, since):
        """Watch until all peers have told the digest of one state; no two may ever differ."""
        digests, chains = collections.defaultdict(dict), collections.defaultdict(set)

        def all_told():
            status = self.status()
            for row in status.history:
                chains[row.position].add(row.chain)
            for peer in status.peers:
                chains[peer.position].add(peer.chain)
                if peer.state_digest:
                    digests[peer.state_position][peer.name] = peer.state_digest
            return any(len(told) == 3 for at, told in digests.items() if at > since)

        until(all_told, "a state that all have told the digest of")
        assert all(len(told) == 1 for told in chains.values())
        assert all(len(set(told.values())) == 1 for told in digests.values()), digests

    def entries(self):
        """The coordinator's log, read from its disk."""
        return self.read_log(self.folder / "coordinator" / "log")

    def await_electors(self, count):
        """Wait until so many vote: a peer that comes back votes again after its first work."""
        path = self.folder / "coordinator" / "log" / LOG_FILE
        newest = "SELECT entry FROM entries ORDER BY position DESC LIMIT 1"

        def electors():
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as log:
                return len(Entry.decode(log.execute(newest).fetchone()[0]).electorate)

        until(lambda: electors() == count, f"{count} electors")

    def read_log(self, folder):
        run_id = Invite.decode(self.invite).run_id
        store = LogStore(folder, run_id=run_id, genesis_chain=bytes(32))
        try:
            records = store.headers(0, ROUNDS)
        finally:
            store.close()
        return [Entry.decode(record.entry) for record in records]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A coordinator and three peers that train; the peers were there before the coordinator."""
    run = Run(tmp_path_factory.mktemp("run"))
    try:
        run.invite = run.start_coordinator()
        run.coordinator.kill()
        for name in ("ann", "ben", "cas"):
            run.start_peer(name)
        run.peers["ann"].await_said("retrying")
        assert run.start_coordinator() == run.invite
        for peer in run.peers.values():
            peer.await_said("trains on", kind="ready")
        yield run
    finally:
        run.close()


def test_peers_that_start_before_the_coordinator_wait_and_join(run):
    until(lambda: run.status().position >= 1, "a round")
    status = run.status()
    assert status.state == "training"
    assert [peer.name for peer in status.peers] != []
    assert {peer.name for peer in status.peers} == {"ann", "ben", "cas"}


def strike_in_reduce(victim, blow, since):
    """Strike a peer as it says that it reduces, from a position on; that position."""
    struck = []

    def strike(event):
        is_reducing = (event["kind"], event["text"]) == ("phase", "reduce")
        if is_reducing and event["position"] >= since and not struck:
            struck.append(event["position"])
            blow()

    victim.heed = strike
    return until(lambda: struck, f"{victim.name} to reduce")[0]


def test_a_peer_killed_in_mid_round_recovers_and_all_are_equal(run):
    victim, before = run.peers["ben"], run.shown("ben")
    position = strike_in_reduce(victim, victim.kill, STRIKE_AT)
    assert victim.wait() == -signal.SIGKILL
    until(lambda: run.status().position > position, "the others to commit that round")
    # Its network process, which only takes its leave, may have stored that round too.
    assert run.head_on_disk("ben") in (position, position + 1)

    shutil.rmtree(run.paths("ben").log())
    again = run.start_peer("ben")
    assert "the snapshot at" in again.await_said("recovered from position 0")["text"]
    there = run.status().position
    until(lambda: run.members_since(there) == 3, "ben to be a member again")
    after = run.shown("ben")
    assert after.peer_id == before.peer_id
    assert after.incarnation != before.incarnation
    assert after.recoveries >= 1
    run.expect_equal_states(since=there)
    run.await_electors(3)


@pytest.mark.exhaustive  # in memory: test_swarm.py
def test_a_peer_frozen_in_mid_round_finds_itself_behind_and_goes_on(run):
    victim, before = run.peers["cas"], run.shown("cas")
    position = strike_in_reduce(victim, victim.freeze, run.position("ben"))
    try:
        until(lambda: run.status().position > position + 2, "the others to go on")
    finally:
        victim.thaw()
    there = run.status().position
    until(lambda: run.members_since(there) == 3, "cas to be a member again")
    after = run.shown("cas")
    assert after.incarnation == before.incarnation
    assert after.recoveries > before.recoveries
    assert not victim.said("resumed at position")
    run.expect_equal_states(since=there)
    run.await_electors(3)


def test_a_peer_that_is_stopped_leaves_the_roster_and_resumes(run):
    peer = run.peers["cas"]
    until(lambda: run.members_since(0) == 3, "a round of three")
    began_s = time.monotonic()
    assert peer.terminate() == 0
    assert time.monotonic() - began_s < STOP_S
    until(lambda: peer.said("left the run", kind="stopped"), "its last words to be read")
    left = run.status()
    shown = next(p for p in left.peers if p.name == "cas")
    assert shown.state == "left"
    assert any((e.source, e.text) == (shown.peer_id, "left") for e in left.events)
    assert run.paths("cas").trainer().exists()

    until(lambda: run.status().position >= left.position + 4, "four rounds without it")
    rounds = [row for row in run.status().history if row.position > left.position]
    assert [row.members for row in rounds[1:]] == [2] * (len(rounds) - 1)
    gaps = [later.at - row.at for row, later in itertools.pairwise(rounds)]
    assert max(gaps) < GRACE_S  # nobody waits for it

    again = run.start_peer("cas")
    again.await_said("resumed at position")
    again.await_said("inner optimizer and data position resumed")
    there = run.status().position
    until(lambda: run.members_since(there) == 3, "cas to be a member again")
    assert run.shown("cas").peer_id == shown.peer_id
    run.await_electors(3)


def test_a_trainer_waits_if_the_other_electors_leave_and_continues_later(run):
    """Without those two no quorum is left of the three that could vote on the next round."""
    run.set_pace(3 * STEP_S)  # so that both have left before another round
    epoch, there = run.status().epoch, run.status().position
    until(lambda: run.members_since(there) == 3, "a round of three")
    there = run.status().position
    for name in ("ben", "cas"):
        run.peers[name].interrupt()
    assert [run.peers[name].wait() for name in ("ben", "cas")] == [130, 130]
    run.set_pace(STEP_S)
    until(lambda: run.status().epoch == epoch + 1, "an epoch of ann alone", STALL_S / 2)
    ended = "with 1 peer: acceptors left"
    assert any(event.text.endswith(ended) for event in run.status().events)
    run.peers["ann"].await_said("waiting for peers")
    assert run.status().position <= there + 2, (
        "the run is for three, and ann spends no rounds of it"
    )

    for name in ("ben", "cas"):
        run.start_peer(name).await_said("resumed at position")
    there = run.status().position
    until(lambda: run.members_since(there) == 3, "both to be members again")
    run.await_electors(3)


def test_no_round_is_lost_without_the_coordinator_and_the_run_ends(run):
    until(lambda: run.members_since(0) == 3, "a round of three")
    run.coordinator.kill()
    there = run.position("ben")
    until(lambda: run.position("ben") >= there + 3, "three rounds without the coordinator")

    assert run.peers["ann"].terminate() == 0
    again = run.start_peer("ann")  # a reboot, from what it saved
    again.await_said("starting without the coordinator")
    again.await_said("resumed at position")
    again.await_said("trains on", kind="ready")
    there = run.position("ben")
    until(lambda: run.position("ann") >= there + 2, "ann to go on")

    assert run.start_coordinator() == run.invite
    there = run.position("ben")

    def knows_all():
        # What it recovers is told once all has come, and what peers publish meanwhile at once.
        known = [row.position for row in run.status().history]
        return len(known) >= there and known == list(range(1, len(known) + 1))

    until(knows_all, "each round that the coordinator missed")
    again.await_said("in touch with the coordinator again")
    run.set_pace(0.0)
    for peer in run.peers.values():
        assert peer.wait(DEADLINE_S) == 0
    status = run.status()
    assert (status.state, status.position) == ("finished", ROUNDS)
    assert {(peer.position, peer.chain) for peer in status.peers} == {(ROUNDS, status.chain)}
    assert {peer.state_position for peer in status.peers} == {ROUNDS}
    assert run.coordinator.terminate() == 0
    checkpoint = load_checkpoint(max((run.folder / "coordinator" / "checkpoints").iterdir()))
    assert {peer.state_digest for peer in status.peers} == {checkpoint.state.root().hex()}
    assert [entry.position for entry in run.entries()] == list(range(ROUNDS))
