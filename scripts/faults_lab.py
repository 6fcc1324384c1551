"""Hosts for `scripts/bench_faults.py`: processes in the lab that faults can strike.

Victim      a host's processes, which can be killed, frozen, thawed, or lose their p2pd
SplitLab    a lab that can be partitioned
Scene       hosts that have met, and their events
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import psutil
from allreduce_host import Facts, Place
from bench_allreduce import introduce

from atoll.dht.testing.wan import WanLab, WanLink

HOST = Path(__file__).resolve().parent / "faults_host.py"
ANSWER_S = 120.0  # for a single answer of a host


class SceneError(RuntimeError):
    """A host ended, or did not report what it should have."""


class Victim:
    """A host, the pipes to it, and the faults that can strike its processes."""

    def __init__(
        self, lab: WanLab, name: str, place: Place, log: IO[bytes], folder: str, nice: int
    ) -> None:
        self.place = place
        self.events: list[Facts] = []
        self._answers: list[Facts] = []
        self._heard = threading.Condition()
        self.process = lab.popen(
            place.host,
            [sys.executable, str(HOST), name, json.dumps(asdict(place))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Linux shares the CPU between sessions
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
                "TMPDIR": folder,
            },
        )
        if nice:  # for the session: the niceness of a process counts within its session only
            Path(f"/proc/{self.process.pid}/autogroup").write_text(str(nice))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            facts = json.loads(line)
            with self._heard:
                (self.events if "event" in facts else self._answers).append(facts)
                self._heard.notify_all()

    def ask(self, question: Facts) -> None:
        """Send a command to the host."""
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Facts:
        """Return the host's answer to the last command."""
        with self._heard:
            if not self._heard.wait_for(lambda: self._answers, ANSWER_S):
                raise SceneError(f"host {self.place.host} gave no answer; see the log")
            return self._answers.pop(0)

    def find(self, event: str, **fields: Any) -> Facts | None:
        """Return the first event of this kind with these fields."""
        with self._heard:
            wanted = {"event": event, **fields}
            return next((e for e in self.events if wanted.items() <= e.items()), None)

    def commits(self) -> list[Facts]:
        """Return the events of all positions that it has committed so far."""
        with self._heard:
            return [e for e in self.events if e["event"] == "commit"]

    # faults

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _signal(self, number: int, name: str = "") -> None:
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                if name in process.name():
                    process.send_signal(number)

    def kill(self) -> None:
        """Kill all its processes at once."""
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop all its processes; its connections stay open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let its processes continue."""
        self._signal(signal.SIGCONT)

    def kill_p2pd(self) -> None:
        """Kill only its libp2p daemon."""
        self._signal(signal.SIGKILL, "p2pd")

    def end(self) -> None:
        """Close its stdin, and kill what is left."""
        left = self._tree()
        self.thaw()
        with suppress(OSError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


class SplitLab(WanLab):
    """A lab that can drop all packets from one side to the other."""

    far: Collection[int] = ()
    """hosts on the other side of the partition"""

    def _destination(self, source: int, packet: bytes) -> int | None:
        to = super()._destination(source, packet)
        return None if to is not None and (source in self.far) != (to in self.far) else to


class Scene:
    """Hosts of one system in a lab of their own."""

    def __init__(
        self, name: str, links: Sequence[WanLink], params: int, log: IO[bytes], *, nice: int = 0
    ) -> None:
        """`name`: "atoll" or one of `allreduce_rivals`; `nice`: relative to other programs."""
        self.name, self.params, self.log, self.nice = name, params, log, nice
        self.lab = SplitLab(links, congestion="cubic")
        self.hosts: list[Victim] = []

    def __enter__(self) -> "Scene":
        self.folder = tempfile.mkdtemp(prefix="faults-")
        self.lab.__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for host in self.hosts:
            host.end()
        self._write_events()
        self.lab.__exit__()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        num_hosts = len(self.lab.links)
        for host in range(num_hosts):
            place = Place(
                host=host,
                ips=[self.lab.ip(i) for i in range(num_hosts)],
                params=self.params,
                codec="int8",
                mbit_s=[link.up for link in self.lab.links],
            )
            self.hosts.append(Victim(self.lab, self.name, place, self.log, self.folder, self.nice))
        self.ids: list[str] = []
        introduce(self.name, [_Introduced(host, self.ids) for host in self.hosts], self.params)

    def _write_events(self) -> None:
        """Write the events of all hosts to the log."""
        told = [(e["at_s"], h.place.host, e) for h in self.hosts for e in h.events if "at_s" in e]
        for at_s, host, event in sorted(told, key=lambda one: one[0]):
            line = f"{at_s:.3f} host {host} {json.dumps(event)}\n"
            for number, name in enumerate(filter(None, self.ids)):
                line = line.replace(name, f"host {number}").replace(name[-6:], f"host {number}")
            self.log.write(line.encode())

    def tell_all(self, question: Facts) -> None:
        """Send a command to all hosts at once."""
        for host in self.hosts:
            host.ask(question)
        for host in self.hosts:
            host.answer()

    def tell(self, host: int, question: Facts) -> Facts:
        """Send a command to one host; return its answer."""
        self.hosts[host].ask(question)
        return self.hosts[host].answer()

    @property
    def everyone(self) -> range:
        """The indices of all hosts."""
        return range(len(self.hosts))

    def others(self, *victims: int) -> list[int]:
        """The hosts that are not struck."""
        return [i for i in range(len(self.hosts)) if i not in victims]

    def until(self, condition: Callable[[], Any], timeout_s: float) -> Any:
        """Poll a condition until it returns something; None after the time limit."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if found := condition():
                return found
            time.sleep(0.005)
        return None

    def first_reduce(self, position: int, timeout_s: float = ANSWER_S) -> Facts:
        """Return the event of the first host that reduces at a position.

        Raises:
            SceneError: no host did.
        """
        found = self.until(lambda: self._first("reduce", position), timeout_s)
        if found is None:
            raise SceneError(f"{self.name}: no host started to reduce position {position}")
        return found

    def _first(self, event: str, position: int) -> Facts | None:
        found = [f for host in self.hosts if (f := host.find(event, position=position))]
        return min(found, key=lambda f: f["at_s"], default=None)

    def committed_s(
        self, hosts: Sequence[int], position: int, timeout_s: float = 60.0
    ) -> float | None:
        """Return when the last of these hosts committed a position; None if one never did."""

        def all_there() -> list[float] | None:
            found = [self.hosts[i].find("commit", position=position) for i in hosts]
            return [f["at_s"] for f in found] if all(found) else None

        times = self.until(all_there, timeout_s)
        return max(times) if times else None

    def position(self) -> int:
        """Return the highest position that any host has committed; -1 before the first."""
        return max((c["position"] for h in self.hosts for c in h.commits()), default=-1)

    def member_again_s(self, host: int, after: int, timeout_s: float = 60.0) -> float | None:
        """Return when a host first committed a later entry that counts all cells of this host."""

        def counted() -> float | None:
            mine = (
                c["at_s"]
                for c in self.hosts[host].commits()
                if c["position"] > after and self.ids[host] in c["members"]
            )
            return min(mine, default=None)

        return self.until(counted, timeout_s)

    def chains_agree(self) -> bool:
        """Return whether no two hosts hold different entries at a position."""
        chains: dict[int, set[str]] = {}
        for host in self.hosts:
            for commit in host.commits():
                chains.setdefault(commit["position"], set()).add(commit["chain"])
        return all(len(known) == 1 for known in chains.values())


class _Introduced:
    """Introduce a host, noting its PeerID."""

    def __init__(self, host: Victim, ids: list[str]) -> None:
        self.ask, self._host, self._ids = host.ask, host, ids

    def answer(self) -> Facts:
        facts = self._host.answer()
        if "hello" in facts:
            self._ids.append(facts["hello"].get("peer_id", ""))
        return facts
