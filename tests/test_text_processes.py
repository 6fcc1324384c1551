"""Text through a live pipeline of processes: `atoll sample INVITE`, and a server that is killed."""

import asyncio
import json
import os
import signal
import subprocess
import threading
import tomllib

import pytest

from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.spec import RunSpec
from atoll.dht.identity import Identity
from atoll.peer.cli.watching import look
from atoll.peer.daemon.live_text import LiveOptions, Reading, live_run
from atoll.peer.paths import PeerPaths
from atoll.peer.training.sampling import SamplingOptions
from support.forks import Forked
from support.live_texts import drawn_again
from support.organiser import LOOPBACK, until

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

OPTIONS = SamplingOptions(max_tokens=24, temperature=0.9, seed=4)
KILLED_AT = 8  # tokens
RUN = """
[run]
name = "spoken"
[model]
preset = "nano"
overrides = {dim = 16, num_layers = 2, num_heads = 2, ffn_dim = 32}
[data]
seq_len = 32
[inner]
batch_size = 2
grad_accumulation = 2
warmup_steps = 2
[outer]
inner_steps = 2
[topology]
stages = 2
[round]
min_peers = 3
snapshot_every = 1
[coordinator]
listen = "127.0.0.1:0"
dht_listen = "127.0.0.1:0"
"""


class Processes:
    """A coordinator and peers as people start them; all are killed at the end."""

    def __init__(self, folder):
        self.folder, self.running, self.events = folder, [], []
        (folder / "RUN.toml").write_text(RUN)

    def start(self, *words):
        with (self.folder / f"{len(self.running)}.log").open("w") as log:
            process = Forked(*words, "--json", stdout=subprocess.PIPE, stderr=log, cwd=self.folder)
        self.running.append(process)
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()
        return process

    def _read(self, lines):
        with lines:
            self.events.extend(map(json.loads, lines))

    def invite(self):
        return next((each["invite"] for each in self.events if "invite" in each), None)

    def end(self):
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


@pytest.fixture
def processes(tmp_path):
    made = Processes(tmp_path)
    yield made
    made.end()


@pytest.fixture
def run(processes):
    """Three peers that serve texts, two of them the first stage, after a round of each stage."""
    processes.start("coordinator", "RUN.toml", "--state-dir", "state")
    invite = until(processes.invite, "an invite")
    peers = {}
    for index in range(3):
        folder = processes.folder / f"peer-{index}"
        words = ("--state-dir", folder, "--yes", "--device", "cpu", "--serve", "0.5")
        process = processes.start("peer", invite, *words, "--share", "0.3")
        key = PeerPaths(root=folder).identity
        until(key.exists, "a key")
        peers[Identity.load_or_create(key).peer_id] = process
        until(lambda: len(look(Invite.decode(invite)).peers) == len(peers), "the peer")
    decoded = Invite.decode(invite)
    until(lambda: all(m.position for m in look(decoded).modules), "a round", 240.0)
    return decoded, peers


def test_a_text_goes_on_when_its_server_is_killed(run, processes, tmp_path):
    invite, peers = run
    replaced = []

    async def use():
        options = LiveOptions(invite=invite, state_dir=tmp_path / "texts", listen=LOOPBACK)
        async with live_run(options) as live:
            pieces = []
            async for piece in live.generate("def ", OPTIONS):
                pieces.append(piece)
                if len(pieces) == KILLED_AT:
                    served_by = live.model.servers[0]
                    os.killpg(peers[served_by].pid, signal.SIGKILL)
                    replaced.append(served_by)
            assert live.model.servers[0] != replaced[0]
            return "".join(pieces), live.readings, live.spec

    text, readings, spec = asyncio.run(use())
    assert text == drawn_again(spec, processes.folder / "state", "def ", OPTIONS, readings)


def test_the_command_prints_the_text_of_the_rounds_it_names(run, processes):
    invite, _ = run
    words = ("--prompt", "def ", "--max-tokens", "24", "--temperature", "0.9", "--seed", "4")
    processes.start("sample", invite.encode(), *words).wait(60)
    told = until(
        lambda: next((each for each in processes.events if "text" in each and "prompt" in each), 0),
        "the text",
    )
    spec = RunSpec.from_dict(tomllib.loads(RUN))
    readings = [
        Reading(token=each["token"], positions=tuple(each[module] for module in spec.modules))
        for each in told["positions"]
    ]
    assert told["text"] == drawn_again(spec, processes.folder / "state", "def ", OPTIONS, readings)
