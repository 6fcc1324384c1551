#!/usr/bin/env python3
"""Run several internet hosts on one machine, with links of a set bandwidth, delay and loss.

Each host is a Linux network namespace with one TUN interface (10.77.0.N). One
process, the switch, carries every packet: a packet waits for its sender's uplink
(serialisation at the uplink rate, tail drop when the buffer is full), travels for
half the sum of the two hosts' delays, then waits for its receiver's downlink.

    wan_lab.py --hosts 4 --rate 100 --rtt 50 -- python worker.py {host} {ip}

Needs root and /dev/net/tun, but no kernel module for traffic control.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MAX_PACKET_BYTES = 65_600
READS_A_TURN = 64  # packets taken from one host before the next host has its turn
POLL_S = 0.05  # longest wait without a look at the stop flag


@dataclass
class Link:
    """One host's access link."""

    up: float = 100.0
    """Mbit/s."""
    down: float = 100.0
    """Mbit/s."""
    delay_ms: float = 25.0
    """One way."""
    loss: float = 0.0
    """Share of packets lost, in [0, 1)."""
    buffer_ms: float = 200.0
    """Length of the queue at the link's own rate; what does not fit is dropped."""


def sh(*args: str) -> None:
    """Run a command; its words are shown only in the error when it fails."""
    subprocess.run(args, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def allow_congestion_control(name: str) -> None:
    """Let network namespaces choose it, which the kernel may keep to the first one."""
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    if name not in (names := allowed.read_text().split()):
        allowed.write_text(" ".join([*names, name]))


class WanLab:
    """Context manager. Host i (from 0) has the address ip(i) and the namespace ns(i)."""

    def __init__(
        self,
        links: Sequence[Link],
        mtu: int = 9000,
        name: str | None = None,
        congestion: str = "",
    ) -> None:
        """`congestion`: TCP's congestion control on the hosts; this machine's if empty."""
        self.links, self.mtu, self.congestion = list(links), mtu, congestion
        self.name = name or f"wl{os.getpid() % 100000}"
        self.up_ = [True] * len(links)
        self.sent = [0] * len(links)  # bytes accepted from each host
        self.received = [0] * len(links)  # bytes delivered to each host
        self.dropped = 0
        self._fds: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._switch, daemon=True)
        self._up_free = [0.0] * len(links)  # when each uplink has sent all that waits for it
        self._down_free = [0.0] * len(links)
        # (time, order, host, at_downlink, packet): a packet first arrives at its receiver's
        # downlink, where it queues behind those that arrived before it, and is then delivered.
        self._queue: list[tuple[float, int, int, bool, bytes]] = []
        self._order = 0

    def ip(self, i: int) -> str:
        return f"10.77.{i // 250}.{i % 250 + 1}"

    def ns(self, i: int) -> str:
        return f"{self.name}-{i}"

    def __enter__(self) -> WanLab:
        if self.congestion:
            allow_congestion_control(self.congestion)
        try:
            for i in range(len(self.links)):
                self._make_host(i)
        except BaseException:
            self._remove_hosts()
            raise
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(2)
        self._remove_hosts()

    def popen(self, i: int, args: Sequence[str], **kw: Any) -> subprocess.Popen[Any]:
        """Start a program on host i."""
        return subprocess.Popen(["ip", "netns", "exec", self.ns(i), *args], **kw)

    def cut(self, i: int) -> None:
        """Lose every packet from and to host i, until `heal`."""
        self.up_[i] = False

    def heal(self, i: int) -> None:
        self.up_[i] = True

    def _make_host(self, i: int) -> None:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._fds.append(fd)
        device = f"{self.name}t{i}"[:15]
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
        sh("ip", "netns", "add", self.ns(i))
        sh("ip", "link", "set", device, "netns", self.ns(i))
        inside = ("ip", "-n", self.ns(i))
        sh(*inside, "link", "set", "lo", "up")
        sh(*inside, "addr", "add", f"{self.ip(i)}/16", "dev", device)
        sh(*inside, "link", "set", device, "mtu", str(self.mtu), "up")
        sh(*inside, "link", "set", device, "txqueuelen", "1000")
        if self.congestion:
            setting = f"net.ipv4.tcp_congestion_control={self.congestion}"
            sh("ip", "netns", "exec", self.ns(i), "sysctl", "-w", setting)

    def _remove_hosts(self) -> None:
        for i, fd in enumerate(self._fds):
            os.close(fd)
            subprocess.run(["ip", "netns", "del", self.ns(i)], stderr=subprocess.DEVNULL)

    def _switch(self) -> None:
        with suppress(OSError):  # a network does not wait for the hosts' programs
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        with selectors.DefaultSelector() as selector:
            for i, fd in enumerate(self._fds):
                selector.register(fd, selectors.EVENT_READ, i)
            while not self._stop.is_set():
                due = self._queue[0][0] - time.monotonic() if self._queue else POLL_S
                for key, _ in selector.select(max(0.0, min(POLL_S, due))):
                    self._take(key.data, key.fd)
                self._move(time.monotonic())

    def _take(self, source: int, fd: int) -> None:
        """Read what host `source` sends and queue it at its uplink."""
        for _ in range(READS_A_TURN):
            try:
                packet = os.read(fd, MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            to = self._destination(source, packet)
            if to is not None:
                self._send(source, to, packet)

    def _destination(self, source: int, packet: bytes) -> int | None:
        is_ipv4 = packet[0] >> 4 == 4
        if not is_ipv4 or packet[16] != 10:
            return None
        to = packet[18] * 250 + packet[19] - 1
        return to if 0 <= to < len(self.links) and self.up_[source] and self.up_[to] else None

    def _send(self, source: int, to: int, packet: bytes) -> None:
        link, now = self.links[source], time.monotonic()
        if link.loss and random.random() < link.loss:
            self.dropped += 1
            return
        start = max(now, self._up_free[source])
        if start - now > link.buffer_ms / 1e3:
            self.dropped += 1
            return
        self._up_free[source] = start + len(packet) * 8 / (link.up * 1e6)
        self.sent[source] += len(packet)
        self._order += 1
        arrive = self._up_free[source] + (link.delay_ms + self.links[to].delay_ms) / 2e3
        heapq.heappush(self._queue, (arrive, self._order, to, False, packet))

    def _move(self, now: float) -> None:
        """Let every packet whose time has come take its next step."""
        while self._queue and self._queue[0][0] <= now:
            arrive, order, to, at_downlink, packet = heapq.heappop(self._queue)
            if not self.up_[to]:
                continue
            if at_downlink:
                self._deliver(to, packet)
            else:
                self._enter_downlink(arrive, order, to, packet)

    def _enter_downlink(self, arrive: float, order: int, to: int, packet: bytes) -> None:
        link = self.links[to]
        start = max(arrive, self._down_free[to])
        if start - arrive > link.buffer_ms / 1e3:
            self.dropped += 1
            return
        self._down_free[to] = start + len(packet) * 8 / (link.down * 1e6)
        heapq.heappush(self._queue, (self._down_free[to], order, to, True, packet))

    def _deliver(self, to: int, packet: bytes) -> None:
        try:
            os.write(self._fds[to], packet)
        except BlockingIOError:
            self.dropped += 1
        else:
            self.received[to] += len(packet)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hosts", type=int, default=4, help="number of hosts (default %(default)s)"
    )
    parser.add_argument("--rate", type=float, default=100.0, help="up and down, Mbit/s")
    parser.add_argument("--rtt", type=float, default=50.0, help="ms between any two hosts")
    parser.add_argument("--loss", type=float, default=0.0, help="fraction of packets")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("expected a command after --")
    link = Link(args.rate, args.rate, args.rtt / 2, args.loss)
    with WanLab([link] * args.hosts) as lab:
        code = run_everywhere(lab, command)
        megabytes = [round(sent / 1e6, 2) for sent in lab.sent]
        print(
            f"wan_lab: MB sent per host {megabytes} dropped packets {lab.dropped}", file=sys.stderr
        )
    return code


def run_everywhere(lab: WanLab, command: Sequence[str]) -> int:
    """Run the command on every host, with its number and addresses filled in; the worst code."""
    processes = []
    for i in range(len(lab.links)):
        known = {"{host}": str(i), "{ip}": lab.ip(i), "{ip0}": lab.ip(0)}
        processes.append(lab.popen(i, [fill(word, known) for word in command]))
    return max(process.wait() for process in processes)


def fill(word: str, known: dict[str, str]) -> str:
    for name, value in known.items():
        word = word.replace(name, value)
    return word


if __name__ == "__main__":
    sys.exit(main())
