"""Bytes on the wire, as the kernel counts them on the TCP sockets of given processes.

Linux reports every socket's counters over netlink (sock_diag(7), INET_DIAG_INFO, `struct
tcp_info`): `tcpi_bytes_sent` holds all payload sent, retransmissions included,
`tcpi_bytes_received` the payload received in order. For p2pd that is libp2p with its encryption and
framing; add our own process id to count gRPC as well. `packet_bytes_*` add the IP and TCP headers
of every segment, acknowledgements included, which is what a network card or a switch counts (less
the 14 bytes of Ethernet).

A socket that closes keeps its last values, read at most one poll earlier. If netlink is not
available (not Linux, or a sandbox), `totals` returns None and the transport reports its own frames
instead, which lack TLS, multiplexing and the DHT: a few percent less.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# From linux/netlink.h, sock_diag.h and inet_diag.h.
SOCK_DIAG = 4
# Older than SOCK_DIAG_BY_FAMILY, and answered with the sockets of both families in one walk of the
# kernel's table. The walk is what a reading costs: 1.3 ms for 262,144 buckets and no sockets.
TCPDIAG_GETSOCK = 18
REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
DONE, ERROR = 3, 2
WITH_TCP_INFO = 1 << 1
# All states but TIME_WAIT (6) and LISTEN (10), which have no bytes.
STATES = 0xFFF & ~(1 << 6) & ~(1 << 10)
HEADER = struct.Struct("=IHHII")
DIAG_BYTES = 72  # struct inet_diag_msg
ATTRIBUTE = struct.Struct("=HH")
TCP_INFO = 2  # INET_DIAG_INFO
REPLY_BYTES = 1 << 16  # twice the most that the kernel puts into one part of a dump
REPLY_TIMEOUT_S = 1.0  # the kernel answers at once; the event loop waits for this
MIN_POLL_S = 0.02  # calls closer together than this share one reading

IP_HEADER_BYTES = {socket.AF_INET: 20, socket.AF_INET6: 40}
TCP_HEADER_BYTES = 20  # without options
TIMESTAMP_BYTES = 12  # the TCP option, when both ends use it


@dataclass(frozen=True, kw_only=True)
class WireTotals:
    """Bytes counted since the counter was created."""

    sent: int = 0
    """TCP payload sent, retransmissions included."""
    received: int = 0
    """TCP payload received."""
    acked: int = 0
    """TCP payload that the other side has confirmed."""
    packet_sent: int = 0
    """`sent` with IP and TCP headers, and with pure acknowledgements."""
    packet_received: int = 0

    def __add__(self, other: WireTotals) -> WireTotals:
        return WireTotals(
            sent=self.sent + other.sent,
            received=self.received + other.received,
            acked=self.acked + other.acked,
            packet_sent=self.packet_sent + other.packet_sent,
            packet_received=self.packet_received + other.packet_received,
        )

    def __sub__(self, other: WireTotals) -> WireTotals:
        return WireTotals(
            sent=self.sent - other.sent,
            received=self.received - other.received,
            acked=self.acked - other.acked,
            packet_sent=self.packet_sent - other.packet_sent,
            packet_received=self.packet_received - other.packet_received,
        )


@dataclass(frozen=True, kw_only=True)
class SocketCount:
    """One socket's counters. A kernel never reuses a `cookie`."""

    cookie: bytes
    totals: WireTotals


class WireCounter:
    """Sums over all TCP sockets that the processes have had while this counter was polled.

    Counts from its creation on.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = set(pids)
        self._closed = WireTotals()
        self._before: dict[bytes, WireTotals] = {}
        self._live: dict[bytes, WireTotals] = {}
        self._read_at_s = float("-inf")
        self._ours: set[int] = set()
        self._others: set[int] = set()
        self._doubtful: set[int] = set()
        self.is_available = is_available()
        self._before = {count.cookie: count.totals for count in self._read()}

    def add(self, pid: int) -> None:
        """Count this process too, including all that its sockets have carried so far."""
        self._pids.add(pid)
        self._others.clear()

    def remove(self, pid: int) -> None:
        """Forget a process that is gone; what it carried stays counted."""
        self._pids.discard(pid)

    def totals(self) -> WireTotals | None:
        """Return the sums, or None if the kernel reports none. Blocks for half a millisecond."""
        if not self.is_available:
            return None
        if time.monotonic() - self._read_at_s >= MIN_POLL_S:
            self.poll()
        return sum(self._live.values(), self._closed)

    def poll(self) -> None:
        """Read the sockets; call it about once a second, so that closed ones lose little."""
        new = {count.cookie: count.totals for count in self._read()}
        for cookie, totals in self._live.items():
            if cookie not in new:
                self._closed += totals
        self._live = {
            cookie: totals - self._before.get(cookie, WireTotals())
            for cookie, totals in new.items()
        }
        self._read_at_s = time.monotonic()

    def _read(self) -> list[SocketCount]:
        if not self.is_available:
            return []
        try:
            sockets = list(tcp_sockets())
        except OSError:
            self.is_available = False
            return []
        self._sort({inode for inode, _ in sockets})
        counts = (_parse(message) for inode, message in sockets if inode in self._ours)
        return [count for count in counts if count is not None]

    def _sort(self, inodes: set[int]) -> None:
        """Sort sockets into ours and others: listing a process's takes longer than reading all.

        A socket belongs to others once two listings lack it: one that is being accepted is in the
        kernel's table before it is in its process's.
        """
        if not inodes <= self._ours | self._others:
            self._ours = {inode for pid in self._pids for inode in socket_inodes(pid)}
            seen_before = self._doubtful | self._others
            self._doubtful = inodes - self._ours
            self._others = self._doubtful & seen_before
        self._others &= inodes


def is_available() -> bool:
    """Return True if this kernel reports socket counters."""
    try:
        list(tcp_sockets())
    except (OSError, AttributeError):  # no AF_NETLINK outside Linux
        return False
    return True


def socket_inodes(pid: int) -> set[int]:
    """Return the inodes of a process's sockets; none if it is gone or not ours."""
    folder, inodes = f"/proc/{pid}/fd", set()
    try:
        names = os.listdir(folder)
    except OSError:
        return set()
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[8:-1]))
    return inodes


def tcp_sockets() -> Iterator[tuple[int, bytes]]:
    """Yield inode (0 until accepted) and message of every connected TCP socket of this network.

    Raises OSError if netlink refuses.
    """
    for message in _dump():
        (inode,) = struct.unpack_from("=I", message, DIAG_BYTES - 4)
        yield inode, message


def _dump() -> Iterator[bytes]:
    body = struct.pack("=3xB48xI4x", WITH_TCP_INFO, STATES)  # struct inet_diag_req
    head = HEADER.pack(HEADER.size + len(body), TCPDIAG_GETSOCK, REQUEST_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, SOCK_DIAG) as link:
        link.settimeout(REPLY_TIMEOUT_S)
        link.sendto(head + body, (0, 0))
        while True:
            for kind, message in _messages(link.recv(REPLY_BYTES)):
                if kind == DONE:
                    return
                if kind == ERROR:
                    raise OSError(-struct.unpack_from("=i", message)[0], "sock_diag refused")
                yield message


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= HEADER.size:
        size, kind, *_ = HEADER.unpack_from(data)
        yield kind, data[HEADER.size : size]
        data = data[(size + 3) & ~3 :]  # netlink aligns messages to 4 bytes


def _parse(message: bytes) -> SocketCount | None:
    cookie, rest = message[44:52], message[DIAG_BYTES:]
    while len(rest) >= ATTRIBUTE.size:
        size, kind = ATTRIBUTE.unpack_from(rest)
        if kind == TCP_INFO:
            totals = _totals(message[0], rest[ATTRIBUTE.size : size])
            return SocketCount(cookie=cookie, totals=totals)
        rest = rest[max(4, (size + 3) & ~3) :]  # a size of 0 would never end
    return None


def _totals(family: int, info: bytes) -> WireTotals:
    acked, received, segments_out, segments_in = struct.unpack_from("=QQII", info, 120)
    sent = struct.unpack_from("=Q", info, 200)[0] if len(info) >= 208 else acked  # Linux < 4.19
    header = IP_HEADER_BYTES[socket.AddressFamily(family)] + TCP_HEADER_BYTES
    header += TIMESTAMP_BYTES if info[5] & 1 else 0
    return WireTotals(
        sent=sent,
        received=received,
        acked=acked,
        packet_sent=sent + segments_out * header,
        packet_received=received + segments_in * header,
    )
