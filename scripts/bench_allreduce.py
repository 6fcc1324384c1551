#!/usr/bin/env python3
"""Time rounds between hosts with a given bandwidth, delay and loss, next to other systems.

    ./scripts/bench allreduce --hosts 4 --rate 100 --rtt 50 --loss 0 --params 10000000 --codec int8
    ./scripts/bench allreduce --peers atoll,hivemind,hivemind-8bit,gloo,naive,tcp,tcp-paced
    ./scripts/bench allreduce --uplinks 100,20,20,100      hosts with slower uplinks
    ./scripts/bench allreduce --json

Every host is a separate process (`allreduce_host.py`) in a network namespace of `WanLab`, which
needs root. `atoll` is a real p2pd, log and rounds engine without a trainer. A round is timed from
the closing of the group until all hosts hold the certificate, without the rendezvous. (Eager sends
leave before that: `from_last_ready_s` counts from the last host's report.) The bound is the minimum
that the uplinks must carry: 2 (P-1) / P of the encoded bytes, or with unequal links the best split
of owners. The other systems (`allreduce_rivals.py`) are timed from their group's start to the last
host's result.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from allreduce_host import Place

from atoll.compression import parse
from atoll.dht.identity import Identity
from atoll.dht.testing.wan import WanLab, WanLink
from atoll.optim.log.entry import Elector, Epoch, SignedEpoch, epoch_payload, genesis_chain
from atoll.optim.state.layout import CELL, Layout
from atoll.optim.state.outer_state import OuterState

ROOT = Path(__file__).resolve().parent.parent
HOST = Path(__file__).resolve().parent / "allreduce_host.py"
PEERS = ("atoll", "hivemind", "hivemind-8bit", "gloo", "naive", "tcp", "tcp-paced")
ANSWER_S = 300.0  # for a single answer of a host
RUN_ID = bytes(32)

Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The rounds of one system."""

    peer: str
    seconds: float
    """median of the warm rounds"""
    all_seconds: list[float]
    first_round_seconds: float
    bytes_sent_per_peer: float
    """by the lab's counters, including headers and acknowledgements"""
    reported_bytes_per_peer: float | None
    """by the peers' own counters"""
    relative_error: float
    replicas_identical: bool
    cpu_seconds_per_gb: float
    """of all processes of all hosts, divided by the GB that the hosts sent"""
    cpu_seconds_p2pd_per_gb: float
    lab_cpu_seconds_per_gb: float
    """of the switch that carries the packets and shares the cores with the hosts"""
    failed_rounds: int
    dropped_packets: int
    detail: Facts


class HostProcess:
    """A host's process and the pipes to it."""

    def __init__(
        self, lab: WanLab, name: str, place: Place, log: IO[bytes], *, nice: int = 0
    ) -> None:
        """`nice` is relative to other programs on this machine, as in nice(1)."""
        command = [sys.executable, str(HOST), name, json.dumps(asdict(place))]
        self.process = lab.popen(
            place.host,
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Linux shares the CPU between sessions
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        )
        if nice:  # for the session: the niceness of a process counts within its session only
            Path(f"/proc/{self.process.pid}/autogroup").write_text(str(nice))

    def ask(self, question: Facts) -> None:
        """Send a command to the host."""
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Facts:
        """Return the host's answer to the last command."""
        guard = threading.Timer(ANSWER_S, self.process.kill)
        guard.start()
        try:
            line = self.process.stdout.readline()
        finally:
            guard.cancel()
        if not line:
            raise RuntimeError(f"a host ended with code {self.process.wait()}; see the log")
        facts: Facts = json.loads(line)
        return facts

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds of the host's live processes, by kind."""
        seconds = {"p2pd": 0.0, "other": 0.0}
        root = psutil.Process(self.process.pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                times, name = process.cpu_times(), process.name()
            except psutil.NoSuchProcess:
                continue
            seconds["p2pd" if "p2pd" in name else "other"] += times.user + times.system
        return seconds

    def end(self) -> None:
        """Close the host's stdin, and kill the host if it does not end."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            self.process.wait()


def ask_all(hosts: Sequence[HostProcess], question: Facts) -> list[Facts]:
    """Send a command to all hosts at once; return their answers."""
    for host in hosts:
        host.ask(question)
    return [host.answer() for host in hosts]


def first_state(params: int) -> Facts:
    """Return what the hosts of a run learn from its coordinator."""
    layout = Layout(names=("w",), shapes=((params,),))
    root = OuterState.genesis(layout, torch.zeros(params)).root()
    return {"run_id": RUN_ID.hex(), "root": root.hex()}


def signed_epoch(organiser: Identity, root: bytes, hellos: Sequence[Facts]) -> str:
    """Return the signed epoch in which all hosts are electors."""
    electors = [Elector(peer_id=h["peer_id"], incarnation=h["incarnation"]) for h in hellos]
    epoch = Epoch(
        run_id=RUN_ID,
        epoch=1,
        base_position=0,
        base_chain=genesis_chain(RUN_ID, root),
        electorate=tuple(electors),
    ).encode()
    signature = organiser.sign(epoch_payload(epoch))
    return SignedEpoch(epoch=epoch, signature=signature).encode().hex()


def introduce(name: str, hosts: Sequence[HostProcess], params: int) -> None:
    """Introduce the hosts to each other, and have them connect."""
    hellos = [host.answer()["hello"] for host in hosts]
    told: Facts = {"meet": hellos}
    if name == "atoll":
        organiser, told = Identity.ephemeral(), told | first_state(params)
        told["organiser"] = organiser.peer_id
        told["epoch"] = signed_epoch(organiser, bytes.fromhex(told["root"]), hellos)
    ask_all(hosts, told)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Counters before or after the warm rounds."""

    sent: list[int]
    cpu: dict[str, float]
    reported: list[Facts]
    lab_cpu: float


def read(lab: WanLab, hosts: Sequence[HostProcess]) -> Reading:
    cpu = [host.cpu() for host in hosts]
    return Reading(
        sent=list(lab.sent),
        cpu={kind: sum(c[kind] for c in cpu) for kind in cpu[0]},
        reported=ask_all(hosts, {"count": True}),
        lab_cpu=time.process_time(),
    )


def seconds_of(answers: Sequence[Facts]) -> float | None:
    """Return the time from the first start to the last end; None for a failed round."""
    if any("failed" in a or a.get("kind") == "null" for a in answers):
        return None
    if any(a.get("members", len(answers)) < len(answers) for a in answers):
        return None
    return max(a["ended_s"] for a in answers) - min(a["started_s"] for a in answers)


def measure(lab: WanLab, name: str, options: argparse.Namespace, log: IO[bytes]) -> Result:
    """Start the hosts; run one cold round, then the warm ones."""
    places = [
        Place(
            host=i,
            ips=[lab.ip(j) for j in range(len(lab.links))],
            params=options.params,
            codec=options.codec,
            mbit_s=[link.up for link in lab.links],
        )
        for i in range(len(lab.links))
    ]
    dropped = lab.dropped
    hosts = [HostProcess(lab, name, place, log, nice=options.nice) for place in places]
    try:
        introduce(name, hosts, options.params)
        rounds = [ask_all(hosts, {"round": 0})]
        before = read(lab, hosts)
        for number in range(1, options.rounds + 1):
            time.sleep(options.pause)
            rounds.append(ask_all(hosts, {"round": number}))
        after = read(lab, hosts)
        ends = ask_all(hosts, {"result": True})
    finally:
        for host in hosts:
            host.end()
    return result_of(name, rounds, before, after, ends, lab.dropped - dropped)


def result_of(
    name: str,
    rounds: Sequence[Sequence[Facts]],
    before: Reading,
    after: Reading,
    ends: Sequence[Facts],
    dropped: int,
) -> Result:
    first, *warm = [seconds_of(answers) for answers in rounds]
    good = [seconds for seconds in warm if seconds is not None]
    sent = [b - a for a, b in zip(before.sent, after.sent, strict=True)]
    gigabytes = sum(sent) / 1e9
    cpu = {kind: after.cpu[kind] - before.cpu[kind] for kind in after.cpu}
    reported = [
        b["wire_sent"] - a["wire_sent"]
        for a, b in zip(before.reported, after.reported, strict=True)
        if "wire_sent" in a
    ]
    return Result(
        peer=name,
        seconds=statistics.median(good) if good else float("nan"),
        all_seconds=[round(s, 3) for s in good],
        first_round_seconds=first if first is not None else float("nan"),
        bytes_sent_per_peer=statistics.mean(sent) / len(warm),
        reported_bytes_per_peer=statistics.mean(reported) / len(warm) if reported else None,
        relative_error=max(end["error"] for end in ends),
        replicas_identical=len({(end["digest"], end.get("root")) for end in ends}) == 1,
        cpu_seconds_per_gb=sum(cpu.values()) / gigabytes,
        cpu_seconds_p2pd_per_gb=cpu["p2pd"] / gigabytes,
        lab_cpu_seconds_per_gb=(after.lab_cpu - before.lab_cpu) / gigabytes,
        failed_rounds=len(warm) - len(good),
        dropped_packets=dropped,
        detail=phases(rounds[1:]),
    )


def phases(rounds: Sequence[Sequence[Facts]]) -> Facts:
    """Return the median seconds of each phase, taking the slowest host of each round."""
    traces = [[answer.get("trace") for answer in answers] for answers in rounds]
    if not all(all(trace) for trace in traces):
        return {}
    names = [key for key in traces[0][0] if key.endswith("_s")]
    slowest = {key: [max(t[key] for t in answers) for answers in traces] for key in names}
    encode = [max(answer["encode_s"] for answer in answers) for answers in rounds]
    applied = [
        max(a["applied_s"] for a in answers) - min(a["started_s"] for a in answers)
        for answers in rounds
    ]
    from_ready = [
        max(a["ended_s"] for a in answers) - max(a["offered_s"] for a in answers)
        for answers in rounds
    ]
    medians = {key: round(statistics.median(values), 3) for key, values in slowest.items()}
    return medians | {
        "encode_s": round(statistics.median(encode), 3),
        "applied_by_all_s": round(statistics.median(applied), 3),
        "from_last_ready_s": round(statistics.median(from_ready), 3),
    }


def links_of(options: argparse.Namespace) -> list[WanLink]:
    """Return the hosts' links."""
    ups = [float(u) for u in options.uplinks.split(",")] if options.uplinks else []
    ups = ups or [options.rate] * options.hosts
    return [
        WanLink(up=up, down=options.rate, delay_ms=options.rtt / 2, loss=options.loss) for up in ups
    ]


def wire_bytes(codec: str, params: int) -> int:
    """Return the bytes of the encoded vector, one codec frame per cell."""
    parsed, (cells, rest) = parse(codec), divmod(params, CELL)
    return cells * parsed.wire_bytes(CELL) + (parsed.wire_bytes(rest) if rest else 0)


def bound_seconds(num_bytes: int, links: Sequence[WanLink]) -> float:
    """Return the minimum time in which some split over owners lets the links carry their bytes.

    An owner of a share s of the vector sends (P-1) s + (1-s) and receives as much. In time T host i
    can therefore own s = (T c / bytes - 1) / (P-2), c being its slower direction, between 0 and 1.
    The bound is the smallest T at which the shares add up to 1 and all hosts can send theirs.
    """
    peers, bits = len(links), 8e-6 * num_bytes
    rates = [min(link.up, link.down) for link in links]
    if peers == 2:
        return max(bits / rate for rate in rates)

    def owned(seconds: float) -> float:
        shares = [(seconds * rate / bits - 1) / (peers - 2) for rate in rates]
        return sum(min(1.0, share) for share in shares) if min(shares) >= 0 else -1.0

    low, high = 0.0, 2 * bits / min(rates)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if owned(middle) >= 1 else (middle, high)
    return high


def load() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def lab_is_possible() -> str:
    """Return why the lab cannot run here; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.path.exists("/dev/net/tun"):
        return "/dev/net/tun is missing"
    made = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)
    return "" if made.returncode == 0 else "the ip command cannot list network namespaces"


def summary(options: argparse.Namespace, links: Sequence[WanLink], results: list[Result]) -> Facts:
    """Return what --json prints: our numbers on top, every system's below."""
    num_bytes = wire_bytes(options.codec, options.params)
    bound = bound_seconds(num_bytes, links)
    head = next((r for r in results if r.peer == "atoll"), results[0])
    return {
        "seconds": head.seconds,
        "bound_seconds": bound,
        "ratio_to_bound": head.seconds / bound,
        "first_round_seconds": head.first_round_seconds,
        "bytes_sent_per_peer": head.bytes_sent_per_peer,
        "relative_error": head.relative_error,
        "replicas_identical": head.replicas_identical,
        "peers": {r.peer: r.seconds for r in results},
        "setting": {
            "hosts": len(links),
            "links": [asdict(link) for link in links],
            "params": options.params,
            "codec": options.codec,
            "encoded_bytes": num_bytes,
            "mtu": options.mtu,
            "congestion_control": options.congestion,
            "nice": options.nice,
            "rounds": options.rounds,
            "pause_s": options.pause,
        },
        "load": load(),
        "results": [asdict(r) for r in results],
    }


def table(report: Facts) -> str:
    """Format the report as a table."""
    rows = [
        f"bound {report['bound_seconds']:.3f} s; load {report['load']}",
        "peer            round s  x bound  first s    MB/host  reported  error %  identical"
        "  CPU s/GB  (p2pd)   (lab)  dropped  failed",
    ]
    for r in report["results"]:
        reported = r["reported_bytes_per_peer"]
        rows.append(
            f"{r['peer']:<15} {r['seconds']:7.3f} {r['seconds'] / report['bound_seconds']:8.2f}"
            f" {r['first_round_seconds']:8.3f} {r['bytes_sent_per_peer'] / 1e6:10.2f}"
            f" {reported / 1e6 if reported else float('nan'):9.2f} {100 * r['relative_error']:8.3f}"
            f" {'yes' if r['replicas_identical'] else 'no':>10} {r['cpu_seconds_per_gb']:9.1f}"
            f" {r['cpu_seconds_p2pd_per_gb']:7.1f} {r['lab_cpu_seconds_per_gb']:7.1f}"
            f" {r['dropped_packets']:8d} {r['failed_rounds']:7d}"
        )
        if r["detail"]:
            words = "  ".join(f"{key[:-2]} {value:.3f}" for key, value in r["detail"].items())
            rows.append(f"                {words}")
        rows.append(f"                rounds: {r['all_seconds']}")
    return "\n".join(rows)


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = arguments.add_argument
    add("--hosts", type=int, default=4, help="number of hosts (default 4)")
    add(
        "--rate",
        type=float,
        default=100.0,
        help="bandwidth in Mbit/s, both directions (default 100)",
    )
    add(
        "--uplinks",
        default="",
        help="uplink bandwidths in Mbit/s, one per host; --rate is then the downlink",
    )
    add("--rtt", type=float, default=50.0, help="round trip between any two hosts, ms (default 50)")
    add("--loss", type=float, default=0.0, help="fraction of packets lost (default 0)")
    add(
        "--params",
        type=int,
        default=10_000_000,
        help="number of values to reduce (default %(default)s)",
    )
    add("--codec", default="int8", help="codec of the reduced vector (default %(default)s)")
    add("--rounds", type=int, default=5, help="number of warm rounds (default 5)")
    add("--pause", type=float, default=2.0, help="idle time between rounds, s (default 2)")
    add(
        "--mtu",
        type=int,
        default=9000,
        help="MTU of the hosts (default 9000); small packets cost the lab CPU",
    )
    add("--congestion", default="cubic", help="TCP congestion control of the hosts (default cubic)")
    add("--nice", type=int, default=0, help="niceness of the hosts; -20: before other programs")
    add("--peers", default="atoll", help=f"comma-separated, of {', '.join(PEERS)}")
    add(
        "--log",
        type=Path,
        default=ROOT / "build" / "bench_allreduce.log",
        help="log of the hosts (default build/bench_allreduce.log)",
    )
    add("--json", action="store_true", help="print the report as JSON")
    return arguments


def main() -> int:
    options = parser().parse_args()
    names = options.peers.split(",")
    if unknown := set(names) - set(PEERS):
        print(f"bench: unknown peers {sorted(unknown)}; choose from {PEERS}", file=sys.stderr)
        return 2
    if why := lab_is_possible():
        print(f"bench: cannot start the hosts: {why}", file=sys.stderr)
        return 2
    links, results = links_of(options), []
    options.log.parent.mkdir(exist_ok=True)
    with options.log.open("wb") as log:
        for name in names:
            with WanLab(links, mtu=options.mtu, congestion=options.congestion) as lab:
                results.append(measure(lab, name, options, log))
    report = summary(options, links, results)
    print(json.dumps(report, indent=1) if options.json else table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
