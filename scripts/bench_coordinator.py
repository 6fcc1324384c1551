#!/usr/bin/env python3
"""Measure a coordinator with many peers and watchers: CPU, memory, and how soon it answers.

    ./scripts/bench coordinator                  1,000 peers, 200 watchers; needs root
    ./scripts/bench coordinator --peers 100 --watchers 20
    ./scripts/bench coordinator --save           also write docs/benchmarks/coordinator.md and .json
    ./scripts/bench coordinator --json           the result as JSON on the last line

A real `atoll coordinator`, and clients in four processes that call from 40 addresses, as no address
may call too often: all in one network namespace, without delay. Peers report as often as the
coordinator asks for, and watchers look as often as it says, as the dashboard does. No peer trains,
and the run has not begun. First peers alone, then with the watchers. All share the cores of this
machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psutil
from bench_allreduce import lab_is_possible
from bench_nat import Case, progress, wait_until
from circumstances import circumstances
from coordinator_load import CONNECTING_S
from rows import put_between

from atoll.coordinator.run.spec import RunSpec
from atoll.dht.testing.wan import sh

ROOT = Path(__file__).resolve().parent.parent
LOAD = ROOT / "scripts" / "coordinator_load.py"
SAVED = ROOT / "docs" / "benchmarks" / "coordinator.json"
PAGE = ROOT / "docs" / "benchmarks" / "coordinator.md"
MARKS = ("<!-- rows of coordinator.json -->", "<!-- end of rows -->")
ADDRESSES, PROCESSES = 40, 4
PORT = 7700


@dataclass(frozen=True, kw_only=True)
class Row:
    """One load. Latencies are those of calls, in milliseconds, at the clients."""

    peers: int
    watchers: int
    beats_per_s: float
    beat_ms: tuple[float, float]
    """median and p99"""
    looks_per_s: float
    look_ms: tuple[float, float]
    """median and p99; zeros without watchers"""
    status_kb: float
    """mean answer to a watcher"""
    failed: int
    """calls"""
    cores: float
    """of the coordinator and its p2pd"""
    memory_mb: float
    """resident, of both, at the end"""


class Loopback:
    """A network namespace in which what calls 127.0.1.N comes from 127.0.2.N."""

    def __enter__(self) -> Self:
        self.name = f"load{os.getpid() % 100000}"
        sh("ip", "netns", "add", self.name)
        sh("ip", "-n", self.name, "link", "set", "lo", "up")
        for number in range(1, ADDRESSES + 1):
            there, source = f"127.0.1.{number}/32", f"127.0.2.{number}"
            way = ("local", there, "dev", "lo", "src", source, "table", "local")
            sh("ip", "-n", self.name, "route", "add", *way)
        return self

    def __exit__(self, *exc: object) -> None:
        sh("ip", "netns", "del", self.name)

    def popen(
        self,
        host: int,
        args: Sequence[str],
        **options: Any,
    ) -> "subprocess.Popen[Any]":
        """Start a program; there is one host."""
        del host
        return subprocess.Popen(["ip", "netns", "exec", self.name, *args], **options)


class Loaded(Case):
    """A coordinator and its clients."""

    def begin(self) -> None:
        """Start a run that waits for more peers than there are."""
        text = self.folder / "text.txt"
        text.write_text("Nobody trains on this text. " * 10_000)
        spec = RunSpec.from_dict(
            {
                "run": {"name": "load"},
                "data": {"source": str(text)},
                "round": {"min_peers": 4096},
                "coordinator": {"listen": f"0.0.0.0:{PORT}", "advertise": "127.0.0.1"},
            }
        )
        self.start_coordinator(spec)

    def load(self, peers: int, watchers: int, seconds: float) -> Row:
        """Let clients call for some seconds."""
        clients = [
            self._client(number, share(peers, number), share(watchers, number), seconds)
            for number in range(PROCESSES)
        ]
        for client in clients:
            if (client.stdout.readline() if client.stdout else "") != "joined\n":
                raise RuntimeError(f"a client did not join\n{self.words()}")
        progress(f"{peers} peers have joined")
        tree = self._tree()
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("go\n")
            client.stdin.flush()
        time.sleep(CONNECTING_S)
        began_s, cpu_s = time.monotonic(), sum(map(cpu_seconds, tree))
        told = [json.loads(client.stdout.readline()) for client in clients if client.stdout]
        cores = (sum(map(cpu_seconds, tree)) - cpu_s) / (time.monotonic() - began_s)
        memory = sum(process.memory_info().rss for process in tree)
        for client in clients:
            client.wait(60)
        return row_of(peers, watchers, seconds, told, cores, memory)

    def _client(
        self, number: int, peers: int, watchers: int, seconds: float
    ) -> "subprocess.Popen[str]":
        own = range(1 + number, ADDRESSES + 1, PROCESSES)
        words = [sys.executable, LOAD, self.invite, peers, watchers, seconds]
        words += [f"127.0.1.{each}:{PORT}" for each in own]
        with (self.folder / f"client-{number}.log").open("a") as log:
            return self.lab.popen(
                0,
                [str(word) for word in words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def _tree(self) -> list[psutil.Process]:
        main = psutil.Process(self.children["coordinator"].pid)
        return [main, *main.children(recursive=True)]


def share(total: int, number: int) -> int:
    """Return how many of some clients are in a process, from 0 on."""
    return total // PROCESSES + (number < total % PROCESSES)


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def row_of(
    peers: int,
    watchers: int,
    seconds: float,
    told: Sequence[dict[str, Any]],
    cores: float,
    memory: int,
) -> Row:
    """Return what all clients told."""
    beats = [s for each in told for s in each["beats"]["seconds"]]
    looks = [s for each in told for s in each["looks"]["seconds"]]
    reply_bytes = sum(each["looks"]["reply_bytes"] for each in told)
    return Row(
        peers=peers,
        watchers=watchers,
        beats_per_s=len(beats) / seconds,
        beat_ms=quantiles_ms(beats),
        looks_per_s=len(looks) / seconds,
        look_ms=quantiles_ms(looks),
        status_kb=reply_bytes / max(1, len(looks)) / 1e3,
        failed=sum(each[kind]["failed"] for each in told for kind in ("beats", "looks")),
        cores=cores,
        memory_mb=memory / 1e6,
    )


def quantiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """Return median and p99 in milliseconds; zeros of nothing."""
    if len(seconds) < 2:
        return 0.0, 0.0
    return 1e3 * statistics.median(seconds), 1e3 * statistics.quantiles(seconds, n=100)[98]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = [
        "| peers | watchers | heartbeats | median, p99 | statuses | median, p99 | of one | "
        "failed | cores | memory | date, commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        beat, look = row["beat_ms"], row["look_ms"]
        lines.append(
            f"| {row['peers']:,} | {row['watchers']} | {row['beats_per_s']:.0f}/s | "
            f"{beat[0]:.0f}, {beat[1]:.0f} ms | {row['looks_per_s']:.0f}/s | "
            f"{look[0]:.0f}, {look[1]:.0f} ms | {row['status_kb']:.0f} kB | {row['failed']} | "
            f"{row['cores']:.2f} | {row['memory_mb']:.0f} MB | {row['date']}, {row['commit']} |"
        )
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure without watchers, and with them."""
    with tempfile.TemporaryDirectory(prefix="load-") as folder, Loopback() as lab:
        with Loaded(lab=lab, folder=Path(folder)) as case:
            case.begin()
            wait_until(lambda: bool(case.status()), 60, case.words)
            return [
                case.load(options.peers, watchers, options.seconds)
                for watchers in dict.fromkeys((0, options.watchers))
            ]


def save(rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows into the benchmark's files."""
    SAVED.write_text(json.dumps(rows, indent=1) + "\n")
    put_between(PAGE, MARKS, table(rows))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="bench coordinator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--peers", type=int, default=1000, metavar="N", help="(default: 1000)")
    result.add_argument("--watchers", type=int, default=200, metavar="N", help="(default: 200)")
    result.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="of each load (default: 60)"
    )
    result.add_argument("--save", action="store_true", help="save the rows in docs/benchmarks")
    result.add_argument("--json", action="store_true", help="print the rows as JSON, last")
    return result


def main() -> int:
    """Do what the arguments ask for."""
    options = parser().parse_args()
    if problem := lab_is_possible():
        print(f"bench coordinator: {problem}; run it as root on Linux", file=sys.stderr)
        return 2
    told = [asdict(row) | circumstances() for row in measure(options)]
    print(table(told))
    if options.save:
        save(told)
    if options.json:
        print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
