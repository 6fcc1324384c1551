"""The shell blocks of README.md, run line by line as a reader would.

`./scripts/demo` and `./scripts/test` are left to their own tests: this file runs inside the second.
A run of README's lines has a smaller model and other ports, so that it takes seconds, needs two
cores and disturbs nobody; the words of each line stay as they are but for INVITE and PEER.
"""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from support.forks import Forked
from support.limits import DEADLINE_S
from support.small_runs import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[1]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
INTERRUPTED = 130  # 128 + SIGINT


def lines_of_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    for block in blocks:
        for line in block.splitlines():
            if line.startswith("atoll "):
                yield line


class Started:
    """A command in a terminal of its own, until it ends or is interrupted."""

    def __init__(self, words, folder, environment, *, answers=b""):
        self.words, self.output = words, ""
        self._terminal, theirs = pty.openpty()
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = Forked(*words[1:], **streams, cwd=folder, env=environment)
        os.close(theirs)
        if answers:
            os.write(self._terminal, answers)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        while True:
            try:
                data = os.read(self._terminal, 1 << 16)
            except OSError:  # the other end is closed
                return
            self.output += data.decode(errors="replace")

    def await_text(self, pattern):
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            found = re.search(pattern, self.output)
            if found:
                return found
            assert self.process.poll() is None, f"{self.words} ended:\n{self.output}"
            time.sleep(0.05)
        raise AssertionError(f"{self.words}: no {pattern!r} in\n{self.output}")

    def type(self, keys):
        os.write(self._terminal, keys)

    def end(self, *, keys=None):
        """Interrupt it, or type `keys`; return its exit code."""
        if keys is None:
            self.process.send_signal(signal.SIGINT)
        else:
            self.type(keys)
        try:
            code = self.process.wait(DEADLINE_S)
        finally:
            self.kill()
        return code

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._reader.join(5)
        if self._terminal >= 0:
            os.close(self._terminal)
            self._terminal = -1


class Reader:
    """Somebody who tries the lines of README, each once."""

    def __init__(self, folder):
        self.folder, self.left, self.started = folder, list(lines_of_the_readme()), []
        self.invite = self.peer = ""
        home = folder / "state"
        self.environment = os.environ | {"XDG_STATE_HOME": str(home), "TERM": "xterm"}
        self.environment["COLUMNS"], self.environment["LINES"] = "120", "40"

    def _words(self, line):
        self.left.remove(line)
        given = {"INVITE": str(self.folder / self.invite), "PEER": self.peer}
        return [given.get(word, word) for word in shlex.split(line, comments=True)]

    def run(self, line):
        done = Forked(*self._words(line)[1:], **PIPES, cwd=self.folder, env=self.environment)
        with done:
            told, complaint = done.communicate(DEADLINE_S)
        assert done.returncode == 0, f"{line}: {complaint}"
        return told

    def start(self, line, answers=b""):
        started = Started(self._words(line), self.folder, self.environment, answers=answers)
        self.started.append(started)
        return started

    def edit(self, **changes):
        """Change fields of RUN.toml, as an organiser would in an editor."""
        path = self.folder / "RUN.toml"
        text = path.read_text(encoding="utf-8")
        for name, value in changes.items():
            field = (
                rf"^{name} = .*$" if re.search(rf"(?m)^{name} = ", text) else rf"^# {name} = .*$"
            )
            text, count = re.subn(field, f"{name} = {value}", text, flags=re.MULTILINE)
            assert count == 1, name
        path.write_text(text, encoding="utf-8")

    def take_invite(self, coordinator, name):
        found = coordinator.await_text(r"atoll1[A-Za-z0-9_-]+")
        (self.folder / name).write_text(found[0], encoding="utf-8")
        self.invite = name


@pytest.fixture
def reader(tmp_path):
    reader = Reader(tmp_path)
    yield reader
    for started in reader.started:
        started.kill()


def test_the_commands_of_the_readme_work_in_the_order_of_a_run(reader):
    reader.run("atoll init RUN.toml")
    shape = ", ".join(f"{name} = {value}" for name, value in TINY.items())
    own = {"listen": '"127.0.0.1:0"', "dht_listen": '"127.0.0.1:0"', "min_peers": "1"}
    reader.edit(**own, overrides=f"{{ {shape} }}")

    coordinator = reader.start("atoll coordinator RUN.toml")
    reader.take_invite(coordinator, "invite")
    for line in ("atoll invite --uses 5 --expires 7d", "atoll invite --role observer --expires 7d"):
        assert "atoll1" in reader.run(line)
    peer = reader.start("atoll peer INVITE")
    peer.await_text(r"\[y/N\]")
    peer.type(b"y\n")
    peer.await_text(r"round 2 ")

    status = json.loads(reader.run("atoll status INVITE --json"))
    (shown,) = status["peers"]
    reader.peer = shown["peer_id"]
    reader.run("atoll report INVITE --out report.html")
    assert "svg+xml" in (reader.folder / "report.html").read_text()
    dashboard = reader.start("atoll dashboard INVITE")
    dashboard.await_text(r"round")
    assert dashboard.end(keys=b"q") == 0
    for line in ("run pause INVITE", "run resume INVITE", "run set INVITE outer_lr=0.5"):
        reader.run(f"atoll {line}")
    reader.run('atoll evict PEER --reason "sends noise"')
    coordinator.await_text("sends noise")
    peer.end()
    assert coordinator.end() == INTERRUPTED

    # Another organiser: with two runs on one machine, `atoll invite` asks which one is meant.
    reader.environment["XDG_STATE_HOME"] = str(reader.folder / "state-of-keepers")
    reader.edit(electors='"keepers"')
    keeping = reader.start("atoll coordinator RUN.toml --keep")
    reader.take_invite(keeping, "second")
    assert "atoll1" in reader.run("atoll invite --role keeper --expires 1d")
    assert keeping.end() == INTERRUPTED
    assert reader.left == [], "lines of README that nothing runs"
