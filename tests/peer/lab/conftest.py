"""Demos whose processes are small scripts that a test controls."""

import asyncio
import json
import os
import sys
import textwrap
import time
import types

import pytest

from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import PeerStatus, RunStatus
from atoll.peer.lab import demo as demo_module
from atoll.peer.lab.demo import Demo, DemoOptions

PROGRAM = """
    import json, os, signal, sys, time
    from pathlib import Path

    here = Path(__file__).parent
    command, *arguments = sys.argv[1:]
    of = lambda name: arguments[arguments.index(name) + 1]
    name = of("--name") if command == "peer" else "coordinator"
    what = json.loads((here / "what.json").read_text()).get(name, "run")
    starts = here / f"{name}.starts"
    if what == "deaf":  # before anybody knows of its start
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (here / f"{name}.arguments").write_text(json.dumps(arguments))
    with starts.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    if isinstance(what, list):  # one thing at each start
        what = what[len(starts.read_text().split()) - 1]

    if command == "coordinator" and what in ("run", "deaf"):
        (Path(of("--state-dir")) / "checkpoints").mkdir(parents=True)
        (Path(of("--state-dir")) / "checkpoints" / "fake.safetensors").touch()
        Path(of("--invite-file")).write_text((here / "invite").read_text())
    if what == "reduce":
        Path(of("--state-dir"), "log").mkdir(parents=True)
        for position in range(100):
            event = {"kind": "phase", "position": position, "level": "info", "phase": "reduce"}
            print(json.dumps(event), flush=True)
    if what.startswith("exit"):
        print(f"{name} says why", file=sys.stderr)
        sys.exit(int(what.split()[1]))
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""


class Told:
    """A `StatusClient` that returns the test's status; None for no answer."""

    status_now = None

    def __init__(self, invite):
        self.invite = invite

    async def status(self):
        if Told.status_now is None:
            raise CoordinatorUnreachable("127.0.0.1:9: connection refused")
        return Told.status_now

    async def close(self):
        pass


class Stage:
    """A folder with the program, and the demo that runs it."""

    def __init__(self, folder):
        self.folder = folder
        self.program = folder / "program.py"
        self.program.write_text(textwrap.dedent(PROGRAM))
        invite = Invite(
            addresses=("127.0.0.1:9",), run_id=bytes(32), run_key=bytes(32), tls_sha256=bytes(32)
        )
        (folder / "invite").write_text(invite.encode())
        (folder / "what.json").write_text("{}")
        self.command = (sys.executable, "-S", "-E", str(self.program))
        self.said = []

    def demo(self, *, peers=2, rounds=5, stages=1, chaos=False, shares=(1.0,), **what):
        names = {name.replace("_", "-"): value for name, value in what.items()}
        (self.folder / "what.json").write_text(json.dumps(names))
        return Demo(
            DemoOptions(
                spec=RunSpec.from_dict({"run": {"rounds": rounds}, "topology": {"stages": stages}}),
                peers=peers,
                out=self.folder / "out",
                chaos=chaos,
                shares=shares,
                program=self.command,
            ),
            say=self.said.append,
        )

    def shares(self):
        """Return the value of --share of each peer."""
        told = [
            json.loads(path.read_text()) for path in sorted(self.folder.glob("peer*.arguments"))
        ]
        return [float(each[each.index("--share") + 1]) for each in told]

    def pids(self):
        return [
            int(pid) for file in self.folder.glob("*.starts") for pid in file.read_text().split()
        ]

    def status(self, state="training", position=0, **changes):
        Told.status_now = RunStatus(
            run_name="demo", run_id="00" * 32, state=state, position=position, **changes
        )
        return Told.status_now


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def show_for_ever(feed):
    while True:
        await asyncio.sleep(3600)


async def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Check that no process outlives the test."""
    monkeypatch.setattr(demo_module, "StatusClient", Told)
    monkeypatch.setattr(demo_module, "POLL_S", 0.02)
    monkeypatch.setattr(Told, "status_now", None)
    stage = Stage(tmp_path)
    yield stage
    assert not [pid for pid in stage.pids() if is_alive(pid)]


@pytest.fixture
def kit():
    """Return the helpers above, which tests cannot import by name."""
    return types.SimpleNamespace(
        PeerStatus=PeerStatus, show_for_ever=show_for_ever, until=until, is_alive=is_alive
    )
