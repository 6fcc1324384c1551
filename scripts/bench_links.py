#!/usr/bin/env python3
"""Measure p2pd over TCP and QUIC, IPv4 and IPv6, through the lab's links.

    ./scripts/bench links                 all rows (about five minutes), needs root
    ./scripts/bench links --loss 0.005 --only "TCP, IPv4" --congestion bbr
    ./scripts/bench links --save          also write docs/benchmarks/links.md and .json
    ./scripts/bench links --json          the rows as JSON on the last line

One host sends 50 MB to another, through a p2pd at each end, in one stream or in eight streams of
one connection. A row is the goodput that the receiver counts from its first byte to its last, or
until its time is over. Packets have 1,500 bytes, as on the internet: a lossy link slows TCP by
packets, so larger ones would flatter it.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import socket
from typing import Any

from bench_allreduce import lab_is_possible
from circumstances import circumstances
from rows import put_between

from atoll.dht.addresses import peer_of
from atoll.dht.identity import Identity
from atoll.dht.p2pd import P2pd, P2pdOptions
from atoll.dht.testing.wan import WanLab, WanLink

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "benchmarks" / "links.json"
PAGE = ROOT / "docs" / "benchmarks" / "links.md"
MARKS = ("<!-- rows of links.json -->", "<!-- end of rows -->")
TRANSPORTS = {
    "TCP, IPv4": "/ip4/{ip}/tcp/7701",
    "QUIC, IPv4": "/ip4/{ip}/udp/7701/quic-v1",
    "TCP, IPv6": "/ip6/{ip6}/tcp/7701",
    "QUIC, IPv6": "/ip6/{ip6}/udp/7701/quic-v1",
}
PROTOCOL = "/bench/links"
TOTAL_BYTES = 50_000_000
LIMIT_S = 10.0  # a row over a lossy link would otherwise take minutes
START_S = 15.0  # from the start of the sender to its first byte
PIECE_BYTES = 256 * 1024
MTU = 1500


@dataclass(frozen=True, kw_only=True)
class Row:
    """One transfer."""

    transport: str
    loss: float
    streams: int
    mbit_s: float
    num_bytes: int
    """received within the time"""
    cpu_s_per_gb: float
    """of the receiver's p2pd"""


def cpu_s_of(pid: int) -> float:
    """Return the seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def receive(address: str) -> None:
    """Print our address, take what comes, and print what it was."""
    daemon = await P2pd.start(Identity.ephemeral(), P2pdOptions(listen=(address,)))
    loop = asyncio.get_running_loop()
    began: asyncio.Future[float] = loop.create_future()
    done = asyncio.Event()
    received, last_s, idle_cpu_s = 0, 0.0, 0.0

    async def take(stream: socket) -> None:
        nonlocal received, last_s, idle_cpu_s
        while piece := await loop.sock_recv(stream, PIECE_BYTES):
            last_s = time.monotonic()
            if not began.done():
                began.set_result(last_s)
                idle_cpu_s = cpu_s_of(daemon.pid)
            received += len(piece)
            if received >= TOTAL_BYTES:
                done.set()

    tasks = []
    await daemon.listen({PROTOCOL: lambda _, stream: tasks.append(loop.create_task(take(stream)))})
    print(daemon.addresses[0], flush=True)
    async with asyncio.timeout(START_S):
        began_s = await began
    try:
        async with asyncio.timeout(LIMIT_S):
            await done.wait()
    except TimeoutError:
        last_s = time.monotonic()
    num_bytes, cpu_s = received, cpu_s_of(daemon.pid) - idle_cpu_s
    await daemon.close()
    print(json.dumps([num_bytes, last_s - began_s, cpu_s]), flush=True)
    os._exit(0)  # its streams are of no interest any more


async def send(address: str, streams: int) -> None:
    """Send to an address until all is sent, or the receiver has gone."""
    daemon = await P2pd.start(Identity.ephemeral(), P2pdOptions())
    peer, loop = peer_of(address), asyncio.get_running_loop()
    piece = os.urandom(PIECE_BYTES)

    async def give() -> None:
        stream = await daemon.open(peer, PROTOCOL, timeout_s=START_S)
        for _ in range(-(-TOTAL_BYTES // (PIECE_BYTES * streams))):
            await loop.sock_sendall(stream, piece)
        await asyncio.sleep(LIMIT_S)

    try:
        await daemon.dial(peer, [address], timeout_s=START_S)
        await asyncio.gather(*(give() for _ in range(streams)))
    except OSError:
        pass  # the receiver's time is over
    finally:
        await daemon.close()


def measure(lab: WanLab, transport: str, loss: float, streams: int) -> Row:
    """Send from host 1 to host 0."""
    listen = TRANSPORTS[transport].format(ip=lab.ip(0), ip6=lab.ip6(0))
    me = (sys.executable, __file__)
    receiver = lab.popen(0, [*me, "--receive", listen], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    address = receiver.stdout.readline().strip()
    sender = lab.popen(1, [*me, "--send", address, "--streams", str(streams)])
    line = receiver.stdout.readline()
    receiver.wait()
    sender.terminate()  # p2pd ends with its owner
    sender.wait()
    if not line:
        raise RuntimeError(f"{transport}: the receiver got nothing")
    num_bytes, seconds, cpu_s = json.loads(line)
    return Row(
        transport=transport,
        loss=loss,
        streams=streams,
        mbit_s=8e-6 * num_bytes / seconds,
        num_bytes=num_bytes,
        cpu_s_per_gb=1e9 * cpu_s / num_bytes,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| transport | loss | streams | Mbit/s | MB received | p2pd's CPU, s per GB |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.transport} | {row.loss:.1%} | {row.streams} | {row.mbit_s:.1f} "
        f"| {row.num_bytes / 1e6:.0f} | {row.cpu_s_per_gb:.1f} |"
        for row in rows
    ]
    return "\n".join(lines)


def report(rows: Sequence[Row], congestion: str) -> dict[str, Any]:
    """Return what --json prints."""
    return {
        **circumstances(),
        "congestion": congestion,
        "mtu": MTU,
        "rows": [asdict(row) for row in rows],
    }


def save(found: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write the report, and the table between the marks of the page."""
    SAVED.write_text(json.dumps(found, indent=1) + "\n")
    head = f"{found['date']}, commit {found['commit']}, {found['machine']}; {found['congestion']}."
    put_between(PAGE, MARKS, f"{head}\n\n{table(rows)}")


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--loss", type=float, help="fraction of packets (default: 0 and 0.005)")
    add("--congestion", default="cubic", help="TCP's congestion control (default %(default)s)")
    add("--only", choices=TRANSPORTS, help="the only transport to measure (default: all)")
    add("--save", action="store_true", help=f"save the rows in {SAVED.name} and {PAGE.name}")
    add("--json", action="store_true", help="print the rows as JSON on the last line")
    add("--receive", default="", help=argparse.SUPPRESS)
    add("--send", default="", help=argparse.SUPPRESS)
    add("--streams", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure all rows; return 1 if this machine cannot."""
    options = arguments()
    if options.receive or options.send:
        work = receive(options.receive) if options.receive else send(options.send, options.streams)
        asyncio.run(work)
        return 0
    if why := lab_is_possible():
        print(f"bench links: {why}", file=sys.stderr)
        return 1
    rows = []
    for loss in (0.0, 0.005) if options.loss is None else (options.loss,):
        with WanLab([WanLink(loss=loss)] * 2, mtu=MTU, congestion=options.congestion) as lab:
            for streams in (1, 8):
                for transport in (options.only,) if options.only else TRANSPORTS:
                    rows.append(measure(lab, transport, loss, streams))
                    print(f"bench links: {rows[-1]}", file=sys.stderr, flush=True)
    print(table(rows))
    found = report(rows, options.congestion)
    if options.save:
        save(found, rows)
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
