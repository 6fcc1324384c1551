"""One signed record that a node shows to whoever can dial it and knows the run, admitted or not.

    protocol  /atoll-notice/1/RUN_ID
    stream    length u32 big-endian | notice       from the callee; the caller sends nothing

All other exchanges begin with an admission, which only the coordinator gives. A newcomer whose
invite names an address that the coordinator has left cannot get one, so the coordinator's new
address must not be behind it. The run's id is in the invite alone, and names the protocol. Nothing
of the caller is read, what is sent is the same for all, and the reader judges the notice by its
signature: neither side trusts the other.

A node sends to few at once and has a budget of notices for all strangers together, as PeerIDs are
free; beyond it, the stream just ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable

from atoll.dht.p2pd import P2pd, exactly
from atoll.dht.tasks import Tasks
from atoll.dht.transport import PeerUnreachable

logger = logging.getLogger(__name__)

VERSION = 1
MAX_NOTICE_BYTES = 12 << 10  # a relocation has at most 10 KiB
SEND_S = 5.0
AT_ONCE = 16  # streams that are sent to; the kernel takes a notice at once, so more are strange
BURST = 64.0  # notices
PER_S = 2.0  # refill; 0.2 Mbit/s of the longest ones
_LENGTH = struct.Struct(">I")


def protocol_name(run_id: str) -> str:
    """Return the libp2p protocol of a run's notices."""
    return f"/atoll-notice/{VERSION}/{run_id}"


class NoticeBoard:
    """Sends strangers what one node shows; nothing until `show` is set."""

    def __init__(self, run_id: str) -> None:
        self.protocol = protocol_name(run_id)
        self.show: Callable[[], bytes] = bytes
        """Returns the present notice; empty if there is none."""
        self.denied = 0
        self._tasks = Tasks()
        self._num_sending = 0
        self._left, self._at_s = BURST, 0.0

    def accept(self, remote: str, connection: socket.socket) -> None:
        """Take over a stream of the protocol."""
        notice = self.show()
        if not notice or self._num_sending >= AT_ONCE or not self._take():
            self.denied += 1
            connection.close()
            return
        self._num_sending += 1
        self._tasks.spawn(self._send(remote, connection, notice))

    async def close(self) -> None:
        """End all streams."""
        await self._tasks.close()

    def _take(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        self._left = min(BURST, self._left + PER_S * max(0.0, now_s - self._at_s))
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True

    async def _send(self, remote: str, connection: socket.socket, notice: bytes) -> None:
        try:
            async with asyncio.timeout(SEND_S):
                frame = _LENGTH.pack(len(notice)) + notice
                await asyncio.get_running_loop().sock_sendall(connection, frame)
        except (OSError, TimeoutError) as error:
            logger.info("a notice did not reach %s: %s", remote, error)
        finally:
            self._num_sending -= 1
            connection.close()


async def read_notice(daemon: P2pd, peer: str, run_id: str, *, timeout_s: float) -> bytes:
    """Return what a connected peer shows, unverified, of at most `MAX_NOTICE_BYTES`.

    Raises:
        PeerUnreachable: it shows nothing, or something else.
        TimeoutError: it did not answer in time.
    """
    async with asyncio.timeout(timeout_s):
        connection = await daemon.open(peer, protocol_name(run_id), timeout_s=timeout_s)
        try:
            (size,) = _LENGTH.unpack(await exactly(connection, _LENGTH.size))
            if size > MAX_NOTICE_BYTES:
                raise PeerUnreachable(
                    f"expected a notice of at most {MAX_NOTICE_BYTES} bytes, got {size}", peer=peer
                )
            return await exactly(connection, size)
        except (EOFError, OSError) as error:
            raise PeerUnreachable(f"it shows nothing: {error}", peer=peer) from error
        finally:
            connection.close()
