"""Several internet hosts on one machine, with links of a set bandwidth, delay and loss, and NATs.

Each host is a Linux network namespace with one TUN interface. One thread, the switch, carries
every packet: a packet waits for its sender's uplink (serialisation at the uplink rate, tail drop
when the buffer is full), travels for half the sum of the two hosts' delays, then waits for its
receiver's downlink. A host may be behind routers (`atoll.dht.testing.nat`): it has a private
address then, and the others see that of its outermost router.

The public addresses look public (11.77.0.N), since libp2p ignores relays with private ones; no
packet leaves this machine. A host without a router has an IPv6 address too. Needs root and
/dev/net/tun, but no kernel module for traffic control or NAT. `scripts/wan_lab.py` runs a command
on every host.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import selectors
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from atoll.dht.testing.nat import Nat, NatKind, Routers

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MAX_PACKET_BYTES = 65_600  # an IP packet has 65,535 at most
READS_A_TURN = 64  # packets taken from one host before the next host has its turn
POLL_S = 0.05  # longest wait without a look at the stop flag


Behind = NatKind | Literal["", "double"]
"""The router in front of a host: none, one of a kind, or a provider's before a port-restricted."""


@dataclass
class WanLink:
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
    behind: Behind = ""


def sh(*args: str) -> None:
    """Run a command; its words are shown only in the error when it fails."""
    subprocess.run(args, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def allow_congestion_control(name: str) -> None:
    """Let network namespaces choose it, which the kernel may keep to the first one."""
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    if name not in (names := allowed.read_text().split()):
        allowed.write_text(" ".join([*names, name]))


class WanLab:
    """Context manager. Others reach host i (from 0) at ip(i); its namespace is ns(i)."""

    def __init__(
        self,
        links: Sequence[WanLink],
        mtu: int = 9000,
        name: str | None = None,
        congestion: str = "",
    ) -> None:
        """Describe the hosts; entering makes them.

        Args:
            links: one for each host.
            mtu: of every host, in bytes.
            name: begins the names of namespaces and devices; one of this process if None.
            congestion: TCP's congestion control on the hosts; this machine's if empty.
        """
        self.links, self.mtu, self.congestion = list(links), mtu, congestion
        self.name = name or f"wl{os.getpid() % 100000}"
        self.up_ = [True] * len(links)
        self.sent = [0] * len(links)  # bytes accepted from each host
        self.received = [0] * len(links)  # bytes delivered to each host
        self.dropped = 0
        self.refused = 0  # packets that a router did not let in
        self._fds: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._switch, daemon=True)
        self._up_free = [0.0] * len(links)  # when each uplink has sent all that waits for it
        self._down_free = [0.0] * len(links)
        # (time, order, host, at_downlink, packet): a packet first arrives at its receiver's
        # downlink, where it queues behind those that arrived before it, and is then delivered.
        self._queue: list[tuple[float, int, int, bool, bytes]] = []
        self._order = 0
        self._moves = 0
        self._public = [f"11.77.{i // 250}.{i % 250 + 1}" for i in range(len(links))]
        self._hosts = {socket.inet_aton(ip): i for i, ip in enumerate(self._public)}
        self._hosts |= {
            socket.inet_pton(socket.AF_INET6, self.ip6(index)): index
            for index, each in enumerate(links)
            if not each.behind
        }
        self._routers = [_routers(link.behind, i, self.ip(i)) for i, link in enumerate(links)]

    def ip(self, i: int) -> str:
        """Return the address at which others see host i."""
        return self._public[i]

    def ip6(self, i: int) -> str:
        """Return the IPv6 address of host i, which has none if it is behind a router."""
        return f"2a77::{i + 1:x}"

    def own_ip(self, i: int) -> str:
        """Return the address that host i itself has."""
        return f"10.{i // 250}.{i % 250}.2" if self.links[i].behind else self._public[i]

    def ns(self, i: int) -> str:
        """Return the name of host i's network namespace."""
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

    def popen(
        self,
        i: int,
        args: Sequence[str],
        **kw: Any,  # noqa: ANN401 - those of Popen
    ) -> subprocess.Popen[Any]:
        """Start a program on host i."""
        return subprocess.Popen(["ip", "netns", "exec", self.ns(i), *args], **kw)

    def cut(self, i: int) -> None:
        """Lose every packet from and to host i, until `heal`."""
        self.up_[i] = False

    def heal(self, i: int) -> None:
        """End a cut."""
        self.up_[i] = True

    def readdress(self, i: int) -> None:
        """Give host i, or its outermost router, another address; every flow to it is lost."""
        del self._hosts[socket.inet_aton(self._public[i])]
        new = f"11.78.{self._moves // 250}.{self._moves % 250 + 1}"
        self._moves += 1
        self._public[i] = new
        self._hosts[socket.inet_aton(new)] = i
        routers = self._routers[i].routers
        for router in routers:
            router.restart(new if router is routers[-1] else None)
        if not routers:
            device = self._device(i)
            sh("ip", "-n", self.ns(i), "-4", "addr", "flush", "dev", device)
            self._address(i)

    def _make_host(self, i: int) -> None:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._fds.append(fd)
        device = self._device(i)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
        sh("ip", "netns", "add", self.ns(i))
        sh("ip", "link", "set", device, "netns", self.ns(i))
        inside = ("ip", "-n", self.ns(i))
        sh(*inside, "link", "set", "lo", "up")
        sh(*inside, "link", "set", device, "mtu", str(self.mtu), "up")
        self._address(i)
        if not self.links[i].behind:
            with suppress(subprocess.CalledProcessError):  # this machine may have IPv6 disabled
                sh(*inside, "addr", "add", f"{self.ip6(i)}/64", "dev", device, "nodad")
                sh(*inside, "-6", "route", "replace", "default", "dev", device)
        sh(*inside, "link", "set", device, "txqueuelen", "1000")
        if self.congestion:
            setting = f"net.ipv4.tcp_congestion_control={self.congestion}"
            sh("ip", "netns", "exec", self.ns(i), "sysctl", "-w", setting)

    def _device(self, i: int) -> str:
        return f"{self.name}t{i}"[:15]

    def _address(self, i: int) -> None:
        inside, device = ("ip", "-n", self.ns(i)), self._device(i)
        sh(*inside, "addr", "add", f"{self.own_ip(i)}/24", "dev", device)
        sh(*inside, "route", "replace", "default", "dev", device)

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
            if packet[0] >> 4 == 6:
                translated, address = packet, packet[24:40]
            elif passed := self._routers[source].outward(packet):
                translated, address = passed, passed[16:20]
            else:
                continue
            to = self._hosts.get(address)
            if to is not None and self.up_[source] and self.up_[to]:
                self._send(source, to, translated)

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
        translated = packet if packet[0] >> 4 == 6 else self._routers[to].inward(packet)
        if translated is None:
            self.refused += 1
            return
        try:
            os.write(self._fds[to], translated)
        except BlockingIOError:
            self.dropped += 1
        else:
            self.received[to] += len(packet)


def _routers(behind: Behind, i: int, public: str) -> Routers:
    if not behind:
        return Routers([])
    if behind != "double":
        return Routers([Nat(behind, public, time.monotonic)])
    home = Nat("port-restricted", f"100.64.{i // 250}.{i % 250 + 1}", time.monotonic)
    return Routers([home, Nat("port-restricted", public, time.monotonic)])
