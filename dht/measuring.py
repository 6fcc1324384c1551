"""Rates between two nodes, and where one sees the other: the call `measure`, within bounds.

    request  want u32 big-endian | padding       the padding measures the caller's uplink
    reply    n u8 | address[n] | padding[want]   the address is where the callee sees the caller

A callee answers admitted peers alone, and moves a few megabytes for each of them in ten minutes.
All of them together get what fills a link of 1 Mbit/s, after a burst, however many PeerIDs they
have. Beyond that it refuses with `busy`.
"""

from __future__ import annotations

import asyncio
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import DeadlineExceeded, Refused, Transport, TransportError

METHOD = "measure"
MAX_WANT_BYTES = 2 << 20  # of one call; a call carries 3 MiB
OF_ONE_BYTES = 8 << 20  # of one peer in `OF_ONE_S`: two measurements of a slow link, one of a fast
OF_ONE_S = 600.0
OF_ALL_BYTES = 32 << 20  # at once; it fills up again at the following rate
OF_ALL_BYTES_S = 1e6 / 8  # 1 Mbit/s: what measurements of others may cost an uplink
MAX_PEERS = 4096  # whose bytes are counted
MAX_ADDRESS_BYTES = 128  # one of IPv6 with a PeerID takes 111

SIZES = (64 << 10, 256 << 10, 1 << 20, 2 << 20)  # 3.3 MB in each direction
DIRECTION_S = 3.0
ENOUGH_S = 0.8  # a transfer that took as long is long enough
_WANT = struct.Struct(">I")


class Allowance:
    """The bytes that a node may still move for measurements."""

    def __init__(self) -> None:
        """Begin with full budgets."""
        self._left, self._at_s = float(OF_ALL_BYTES), 0.0
        self._used: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """begin of the ten minutes and bytes in them, by peer; the oldest first"""

    def take(self, peer: str, num_bytes: int, now_s: float) -> bool:
        """Return whether a peer may have these bytes; if so, count them."""
        self._left = min(OF_ALL_BYTES, self._left + OF_ALL_BYTES_S * max(0.0, now_s - self._at_s))
        self._at_s = now_s
        since_s, used = self._used.get(peer, (now_s, 0))
        if now_s - since_s >= OF_ONE_S:
            since_s, used = now_s, 0
        if used + num_bytes > OF_ONE_BYTES or num_bytes > self._left:
            return False
        self._left -= num_bytes
        self._used[peer] = since_s, used + num_bytes
        if len(self._used) > MAX_PEERS:
            self._used.popitem(last=False)
        return True


def serve(transport: Transport, addresses_of: Callable[[str], Awaitable[list[str]]]) -> None:
    """Answer the measurements of others.

    Args:
        transport: ours.
        addresses_of: returns from where a connected peer comes, given its PeerID.
    """
    allowance = Allowance()

    async def answer(remote: str, body: bytes) -> bytes:
        want = _WANT.unpack_from(body)[0] if len(body) >= _WANT.size else MAX_WANT_BYTES + 1
        if want > MAX_WANT_BYTES:
            raise Refused(RefusalCode.BAD_REQUEST, f"expected at most {MAX_WANT_BYTES} bytes")
        now_s = asyncio.get_running_loop().time()
        if not allowance.take(remote, len(body) + want, now_s):
            raise Refused(RefusalCode.BUSY, "enough was measured here; try again in ten minutes")
        address = b""
        with suppress(TransportError, TimeoutError, OSError):
            address = (await addresses_of(remote) or [""])[0].encode()[:MAX_ADDRESS_BYTES]
        return bytes([len(address)]) + address + bytes(want)

    transport.serve(METHOD, answer)


@dataclass(frozen=True, kw_only=True)
class PathRates:
    """The measurements of the way to one peer. Rates in Mbit/s; None if nothing passed in time."""

    seen_at: str
    """Multiaddr from which the peer sees us come; empty if it is not connected directly."""
    up_mbit_s: float | None
    down_mbit_s: float | None


async def measure(transport: Transport, peer: str) -> PathRates:
    """Measure the link to a peer, in at most `DIRECTION_S` for each direction and for the first.

    Raises:
        TransportError: the peer cannot be reached, refuses, or answers something else.
    """
    loop = asyncio.get_running_loop()

    async def ask(want: int, padding: int, timeout_s: float) -> tuple[bytes, float]:
        began_s = loop.time()
        body = _WANT.pack(want) + bytes(padding)
        reply = await transport.call(peer, METHOD, body, timeout_s=timeout_s)
        return _address(reply, want, peer), loop.time() - began_s

    await ask(0, 0, DIRECTION_S)  # opens the stream; the next call is one round trip
    address, trip_s = await ask(0, 0, DIRECTION_S)

    async def rate(*, is_up: bool) -> float | None:
        found = None
        end_s = loop.time() + DIRECTION_S
        for size in SIZES:
            left_s = end_s - loop.time()
            if left_s <= 0 or (found is not None and 8e-6 * size / found > left_s):
                break
            try:
                want, padding = (0, size) if is_up else (size, 0)
                _, took_s = await ask(want, padding, left_s)
            except DeadlineExceeded:
                break
            except Refused as error:  # two in a row by one user: what passed is known
                if found is None or error.code != RefusalCode.BUSY:
                    raise
                break
            found = 8e-6 * size / max(took_s - min(trip_s, took_s / 2), 1e-6)
            if took_s >= ENOUGH_S:
                break
        return found

    return PathRates(
        seen_at=_text(address),
        up_mbit_s=await rate(is_up=True),
        down_mbit_s=await rate(is_up=False),
    )


def _address(reply: bytes, want: int, peer: str) -> bytes:
    if not reply or len(reply) != 1 + reply[0] + want or reply[0] > MAX_ADDRESS_BYTES:
        raise Refused(RefusalCode.BAD_MESSAGE, "expected an answer to `measure`", peer=peer)
    return reply[1 : 1 + reply[0]]


def _text(address: bytes) -> str:
    """Return an address that another node wrote, empty if it is no plain text."""
    text = address.decode("ascii", "replace")
    return text if text.isascii() and text.isprintable() else ""
