#!/usr/bin/env python3
"""Time of a round between hosts of set speed, delay and loss, ours and others' side by side.

    ./scripts/bench allreduce --hosts 4 --rate 100 --rtt 50 --loss 0 --params 10000000 --codec int8
    ./scripts/bench allreduce --peers atoll,hivemind,hivemind-8bit,gloo,naive,tcp,tcp-paced
    ./scripts/bench allreduce --uplinks 100,20,20,100      hosts that are slower upwards
    ./scripts/bench allreduce --json

Every host is a process of its own (`allreduce_host.py`) in a network namespace of `wan_lab.py`;
root is needed. Ours is a real p2pd, log and rounds engine without a trainer. A round runs from the
group closed to the certificate held by all hosts; finding each other is not in it. (Codes leave
before that: `from_last_ready_s` counts from the last host's report.) The bound is
what the uplinks must carry at least: 2 (P-1) / P of the encoded bytes, or with unequal links the
best split of owners. Other peers (`allreduce_rivals.py`) are timed from their group's start to the
last host's result.
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
from wan_lab import Link, WanLab

from atoll.compression import parse
from atoll.dht.identity import Identity
from atoll.optim.log.entry import Elector, Epoch, SignedEpoch, epoch_payload, genesis_chain
from atoll.optim.state.layout import CELL, Layout
from atoll.optim.state.outer_state import OuterState

ROOT = Path(__file__).resolve().parent.parent
HOST = Path(__file__).resolve().parent / "allreduce_host.py"
PEERS = ("atoll", "hivemind", "hivemind-8bit", "gloo", "naive", "tcp", "tcp-paced")
ANSWER_S = 300.0  # for any one answer of a host
RUN_ID = bytes(32)

Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One peer's rounds."""

    peer: str
    seconds: float
    """median of the warm rounds"""
    all_seconds: list[float]
    first_round_seconds: float
    bytes_sent_per_peer: float
    """by the lab's counters, headers and acknowledgements included"""
    reported_bytes_per_peer: float | None
    """by the peers' own counters"""
    relative_error: float
    replicas_identical: bool
    cpu_seconds_per_gb: float
    """of all processes of all hosts, over the bytes that the hosts sent"""
    cpu_seconds_p2pd_per_gb: float
    lab_cpu_seconds_per_gb: float
    """of the switch that is the network, and that shares the cores with the hosts"""
    failed_rounds: int
    dropped_packets: int
    detail: Facts


class HostProcess:
    """A host and the line to it."""

    def __init__(
        self, lab: WanLab, name: str, place: Place, log: IO[bytes], *, nice: int = 0
    ) -> None:
        """`nice` is towards what else runs on this machine, as in nice(1)."""
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
        if nice:  # of the session: the niceness of a process counts within its session only
            Path(f"/proc/{self.process.pid}/autogroup").write_text(str(nice))

    def ask(self, question: Facts) -> None:
        """Tell the host what to do."""
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Facts:
        """What it says to that."""
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
        """CPU seconds of the host's processes that live, by kind."""
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
        """Close its input, and kill it if that is not enough."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            self.process.wait()


def ask_all(hosts: Sequence[HostProcess], question: Facts) -> list[Facts]:
    """All hosts do it at once; their answers."""
    for host in hosts:
        host.ask(question)
    return [host.answer() for host in hosts]


def first_state(params: int) -> Facts:
    """What the hosts of a run know from its coordinator."""
    layout = Layout(names=("w",), shapes=((params,),))
    root = OuterState.genesis(layout, torch.zeros(params)).root()
    return {"run_id": RUN_ID.hex(), "root": root.hex()}


def signed_epoch(organiser: Identity, root: bytes, hellos: Sequence[Facts]) -> str:
    """The epoch in which all hosts are electors."""
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
    """Hosts learn of each other and connect."""
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
    """From the first that started to the last that ended; None for a failed round."""
    if any("failed" in a or a.get("kind") == "null" for a in answers):
        return None
    if any(a.get("members", len(answers)) < len(answers) for a in answers):
        return None
    return max(a["ended_s"] for a in answers) - min(a["started_s"] for a in answers)


def measure(lab: WanLab, name: str, options: argparse.Namespace, log: IO[bytes]) -> Result:
    """Start the hosts, one cold round, then warm ones."""
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
    """Median seconds of the phases of our rounds, the slowest host of each round."""
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


def links_of(options: argparse.Namespace) -> list[Link]:
    """The hosts' links."""
    ups = [float(u) for u in options.uplinks.split(",")] if options.uplinks else []
    ups = ups or [options.rate] * options.hosts
    return [
        Link(up=up, down=options.rate, delay_ms=options.rtt / 2, loss=options.loss) for up in ups
    ]


def wire_bytes(codec: str, params: int) -> int:
    """Bytes of the encoded vector, a codec frame a cell."""
    parsed, (cells, rest) = parse(codec), divmod(params, CELL)
    return cells * parsed.wire_bytes(CELL) + (parsed.wire_bytes(rest) if rest else 0)


def bound_seconds(num_bytes: int, links: Sequence[Link]) -> float:
    """The shortest time in which any split over owners lets the links carry their bytes.

    With share s of the vector an owner sends (P-1) s + (1-s) and receives as much. In time T host
    i can thus own s = (T c / bytes - 1) / (P-2), c its slower direction, between 0 and 1; the
    bound is the least T at which the shares reach 1, and at which everybody can send its own.
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
    """Why the lab cannot be; empty if it can."""
    if os.geteuid() != 0:
        return "expected root, for network namespaces"
    if not os.path.exists("/dev/net/tun"):
        return "expected /dev/net/tun"
    made = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)
    return "" if made.returncode == 0 else "expected the ip command with network namespaces"


def summary(options: argparse.Namespace, links: Sequence[Link], results: list[Result]) -> Facts:
    """What --json prints: our numbers on top, every peer's below."""
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
    """For people."""
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
    add("--hosts", type=int, default=4)
    add("--rate", type=float, default=100.0, help="Mbit/s, up and down")
    add("--uplinks", default="", help="Mbit/s up, one number a host; --rate is down then")
    add("--rtt", type=float, default=50.0, help="ms between any two hosts")
    add("--loss", type=float, default=0.0, help="share of packets lost")
    add("--params", type=int, default=10_000_000)
    add("--codec", default="int8")
    add("--rounds", type=int, default=5, help="warm rounds")
    add("--pause", type=float, default=2.0, help="seconds between rounds, in which links idle")
    add("--mtu", type=int, default=9000, help="of the hosts; small packets cost the lab CPU")
    add("--congestion", default="cubic", help="TCP's congestion control on the hosts")
    add("--nice", type=int, default=0, help="of the hosts; -20 keeps other programs out of the way")
    add("--peers", default="atoll", help=f"of {', '.join(PEERS)}")
    add("--log", type=Path, default=ROOT / "build" / "bench_allreduce.log")
    add("--json", action="store_true")
    return arguments


def main() -> int:
    options = parser().parse_args()
    names = options.peers.split(",")
    if unknown := set(names) - set(PEERS):
        print(f"bench: unknown peers {sorted(unknown)}; there are {PEERS}", file=sys.stderr)
        return 2
    if why := lab_is_possible():
        print(f"bench: no lab of hosts here: {why}", file=sys.stderr)
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
