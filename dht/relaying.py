"""Streams through a third peer, for two that cannot dial each other: both are behind NATs.

    A                            relay R                          B
    ASK  B, hello of A,
         admission of A   --->   BRING  A, hello of A,
                                        admissions of A, R --->
                          <---   JOINED hello of B        <---    JOINED hello of B
    ================= TLS 1.3 from A to B; R copies bytes =================

A and B have a connection to R each, which they dialed. R joins a stream of A's with one that it
opens to B. It serves admitted peers alone, at the rate that its owner allows, and can read nothing
of what it carries: a *hello* is a TLS certificate, made for one start of a process, that the
sender's identity has signed. Both ends pin the certificate of the other's hello, so R can neither
be A nor B.

p2pd has relays of its own. They serve strangers, know no limit of bandwidth, and end a circuit
after 128 KiB whenever the second of the two services that p2pd starts is the one that registers
last (learning-at-home/go-libp2p-daemon, `EnableRelayV2`).

A frame is `kind u8 | length u16 | fields`, a field `length u16 | bytes`.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import socket
import ssl
import struct
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from atoll.dht.identity import SIGNATURE_BYTES, Identity, verify
from atoll.dht.p2pd import P2pd, exactly, open_files
from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import Tasks, end
from atoll.dht.transport import (
    VERSION,
    Check,
    DeadlineExceeded,
    PeerUnreachable,
    Refused,
    decode_refusal,
    encode_refusal,
)

logger = logging.getLogger(__name__)

CIRCUIT = "/p2p-circuit"
MAX_FRAME_BYTES = 12 << 10  # two admissions of 4 KiB, a certificate of 300 bytes, a PeerID
MAX_HELLO_BYTES = 2 << 10
JOIN_S = 10.0  # for each frame before the two are joined
LINGER_S = 60.0  # for the second direction to end after the first, as for a call's stream
PIECE_BYTES = 64 << 10  # copied at once; what p2pd puts into a message
MAX_PER_PEER = 256  # relayed streams of one peer, as many as it may open to another
SPARE_FILES = 4  # one in so many descriptors may be an end of a relayed stream
MAX_CONTEXTS = 1024  # TLS settings kept, one for each peer that was met
FOREVER = datetime.datetime(1970, 1, 1), datetime.datetime(9999, 12, 31)  # clocks may be wrong


class Kind(IntEnum):
    """The first byte of a frame."""

    ASK = 1
    BRING = 2
    JOINED = 3
    REFUSED = 4


Joined = Callable[[str, socket.socket, ssl.SSLContext], None]
"""Takes over a stream that somebody opened to us: PeerID, socket, TLS to accept it with."""


def protocol_name(run_id: str) -> str:
    """Return the libp2p protocol of a run's relayed streams."""
    return f"/atoll-relay/{VERSION}/{run_id}"


def relay_of(address: str) -> str | None:
    """Return the relay's PeerID in an address such as /ip4/1.2.3.4/tcp/1/p2p/R/p2p-circuit/p2p/B.

    None for an address that can be dialed.
    """
    before, found, _ = address.partition(CIRCUIT)
    return before.rpartition("/p2p/")[2] if found else None


def through(relay_address: str, peer_id: str) -> str:
    """Return the address of a peer behind a relay that listens at `relay_address`."""
    return f"{relay_address}{CIRCUIT}/p2p/{peer_id}"


class Secrets:
    """This process's TLS certificate, and the contexts for the peers that it meets."""

    def __init__(self, identity: Identity, run_id: str) -> None:
        """Make a certificate of our own for this start."""
        self._run_id = run_id.encode()
        key = Ed25519PrivateKey.generate()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.peer_id)])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(FOREVER[0])
            .not_valid_after(FOREVER[1])
            .sign(key, None)
        )
        der = certificate.public_bytes(Encoding.DER)
        self.hello = identity.sign(self._payload(der)) + der
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self._pem = pem + certificate.public_bytes(Encoding.PEM)
        self._contexts: OrderedDict[tuple[bytes, bool], ssl.SSLContext] = OrderedDict()

    def _payload(self, der: bytes) -> bytes:
        return b"atoll relay tls 1" + self._run_id + b"\0" + der

    def context(self, peer: str, hello: bytes, *, server_side: bool) -> ssl.SSLContext:
        """Return TLS settings that accept nobody but the process that made `hello`.

        Raises:
            Refused: `peer` has not signed it.
        """
        context = self._contexts.get((hello, server_side))
        if context is None:
            context = self._contexts[hello, server_side] = self._new(peer, hello, server_side)
            if len(self._contexts) > MAX_CONTEXTS:
                self._contexts.popitem(last=False)
        elif not self._is_of(peer, hello):
            raise Refused(RefusalCode.NOT_ADMITTED, f"expected a hello of {peer}")
        return context

    def _is_of(self, peer: str, hello: bytes) -> bool:
        signature, der = hello[:SIGNATURE_BYTES], hello[SIGNATURE_BYTES:]
        return verify(peer, self._payload(der), signature)

    def _new(self, peer: str, hello: bytes, server_side: bool) -> ssl.SSLContext:
        if len(hello) > MAX_HELLO_BYTES or not self._is_of(peer, hello):
            raise Refused(RefusalCode.NOT_ADMITTED, f"expected a hello of {peer}")
        protocol = ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=hello[SIGNATURE_BYTES:])
        except ssl.SSLError as error:
            raise Refused(RefusalCode.BAD_MESSAGE, f"{peer}: no certificate: {error}") from error
        with tempfile.NamedTemporaryFile() as file:  # Python's ssl reads keys from files alone
            file.write(self._pem)
            file.flush()
            context.load_cert_chain(file.name)
        return context


class Rate:
    """A limit of bytes a second that many streams share, each a piece at a time."""

    def __init__(self, mbit_s: float) -> None:
        """Allow so many Mbit/s."""
        self._bytes_s = mbit_s * 1e6 / 8
        self._turn = asyncio.Lock()  # first come, first served: streams take turns
        self._free_at_s = 0.0

    async def take(self, num_bytes: int) -> None:
        """Wait until these bytes may pass."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            wait_s = self._free_at_s - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._free_at_s = max(self._free_at_s, loop.time()) + num_bytes / self._bytes_s


class Relaying:
    """The relayed streams of one node: those it opens, those opened to it, those it carries."""

    def __init__(
        self,
        identity: Identity,
        *,
        run_id: str,
        check: Check,
        admission: Callable[[], bytes],
        relay_mbit_s: float = 0.0,
    ) -> None:
        """Begin without a daemon; see `bind`.

        Args:
            identity: ours.
            run_id: names the protocol; other runs are invisible.
            check: judges the admissions of others.
            admission: returns our own.
            relay_mbit_s: what we carry for others, both directions together; 0 carries nothing.
        """
        self.protocol = protocol_name(run_id)
        self.carried: Counter[str] = Counter()
        """bytes by the peer that sent them"""
        self.denied = 0
        self._me = identity.peer_id
        self._secrets = Secrets(identity, run_id)
        self._check = check
        self._admission = admission
        self._rate = Rate(relay_mbit_s) if relay_mbit_s > 0 else None
        self._tasks = Tasks()
        self._pairs: Counter[str] = Counter()
        self._daemon: P2pd | None = None
        self._joined: Joined | None = None

    def bind(self, daemon: P2pd, joined: Joined) -> None:
        """Use this daemon from now on, and pass streams that others open to us to `joined`."""
        self._daemon, self._joined = daemon, joined

    async def close(self) -> None:
        """End all relayed streams."""
        await self._tasks.close()

    # The end that opens

    async def open(
        self, relay: str, peer: str, *, timeout_s: float
    ) -> tuple[socket.socket, ssl.SSLContext]:
        """Open a stream to a peer through a relay; return its socket and TLS for it.

        Raises:
            PeerUnreachable: the relay cannot be reached, or cannot reach the peer.
            Refused: by the relay or by the peer.
        """
        assert self._daemon is not None
        connection = await self._daemon.open(relay, self.protocol, timeout_s=timeout_s)
        try:
            ask = (peer.encode(), self._secrets.hello, self._admission())
            await _send(connection, Kind.ASK, *ask)
            hello = await _answer(connection, relay)
            return connection, self._secrets.context(peer, hello, server_side=False)
        except BaseException:
            connection.close()
            raise

    # The other end, and the relay

    def accept(self, remote: str, connection: socket.socket) -> None:
        """Take over a stream of the protocol."""
        self._tasks.spawn(self._serve(remote, connection))

    async def _serve(self, remote: str, connection: socket.socket) -> None:
        try:
            kind, fields = await _receive(connection)
            if kind == Kind.ASK and len(fields) == 3:
                await self._carry(remote, connection, *fields)
            elif kind == Kind.BRING and len(fields) == 4:
                if await self._take(remote, connection, *fields):
                    return  # the stream has another owner now
            else:
                raise Refused(RefusalCode.BAD_MESSAGE, "expected ASK or BRING")
        except Refused as error:
            self.denied += 1
            with suppress(OSError, TimeoutError):
                await _send(connection, Kind.REFUSED, encode_refusal(error))
        except (PeerUnreachable, OSError, EOFError, TimeoutError, ValueError) as error:
            logger.info("a relayed stream of %s ended before it began: %s", remote, error)
        connection.close()

    async def _take(
        self,
        relay: str,
        connection: socket.socket,
        source: bytes,
        hello: bytes,
        admission: bytes,
        relay_admission: bytes,
    ) -> bool:
        peer = source.decode("ascii")
        self._check(relay, relay_admission)
        self._check(peer, admission)
        context = self._secrets.context(peer, hello, server_side=True)
        await _send(connection, Kind.JOINED, self._secrets.hello)
        if self._joined is None:
            return False
        self._joined(peer, connection, context)
        return True

    async def _carry(
        self, source: str, near: socket.socket, target: bytes, hello: bytes, admission: bytes
    ) -> None:
        if self._rate is None or self._daemon is None:
            raise Refused(RefusalCode.NO_RELAY, "this peer relays nothing")
        self._check(source, admission)
        if self._pairs[source] >= MAX_PER_PEER or self._pairs.total() >= open_files() // (
            2 * SPARE_FILES
        ):
            raise Refused(RefusalCode.NO_RELAY, "too many relayed streams; try again later")
        self._pairs[source] += 1
        try:
            far = await self._bring(source, target.decode("ascii"), hello, admission)
            try:
                await _send(near, Kind.JOINED, await _answer(far, target.decode()))
                await self._copy(source, near, target.decode(), far)
            finally:
                far.close()
        finally:
            self._pairs[source] -= 1
            self._pairs += Counter()  # forget those without any

    async def _bring(
        self, source: str, target: str, hello: bytes, admission: bytes
    ) -> socket.socket:
        assert self._daemon is not None
        if target not in await self._daemon.connected():
            raise Refused(RefusalCode.NO_RELAY, f"{target} has no connection to this relay")
        far = await self._daemon.open(target, self.protocol, timeout_s=JOIN_S)
        try:
            admissions = (admission, self._admission())
            await _send(far, Kind.BRING, source.encode(), hello, *admissions)
        except BaseException:
            far.close()
            raise
        return far

    async def _copy(
        self, source: str, near: socket.socket, target: str, far: socket.socket
    ) -> None:
        """Copy both directions until both have ended, or one breaks."""
        ways = [
            asyncio.create_task(self._one_way(source, near, far)),
            asyncio.create_task(self._one_way(target, far, near)),
        ]
        try:
            _, left = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if left:
                await asyncio.wait(left, timeout=LINGER_S)
        finally:
            await end(*ways, expected=(OSError,))

    async def _one_way(self, sender: str, from_: socket.socket, to: socket.socket) -> None:
        assert self._rate is not None
        loop = asyncio.get_running_loop()
        buffer = memoryview(bytearray(PIECE_BYTES))
        while num_bytes := await loop.sock_recv_into(from_, buffer):
            await self._rate.take(num_bytes)
            await loop.sock_sendall(to, buffer[:num_bytes])
            self.carried[sender] += num_bytes
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)


async def _send(connection: socket.socket, kind: Kind, *fields: bytes) -> None:
    payload = b"".join(struct.pack(">H", len(field)) + field for field in fields)
    frame = struct.pack(">BH", kind, len(payload)) + payload
    async with asyncio.timeout(JOIN_S):
        await asyncio.get_running_loop().sock_sendall(connection, frame)


async def _receive(connection: socket.socket) -> tuple[int, list[bytes]]:
    async with asyncio.timeout(JOIN_S):
        kind, size = struct.unpack(">BH", await exactly(connection, 3))
        if size > MAX_FRAME_BYTES:
            raise Refused(RefusalCode.TOO_LONG, f"expected at most {MAX_FRAME_BYTES} bytes")
        payload = await exactly(connection, size)
    fields, at = [], 0
    while at < size:
        (length,) = struct.unpack_from(">H", payload, at) if at + 2 <= size else (size,)
        if at + 2 + length > size:
            raise Refused(RefusalCode.BAD_MESSAGE, "expected whole fields")
        fields.append(payload[at + 2 : at + 2 + length])
        at += 2 + length
    return kind, fields


async def _answer(connection: socket.socket, peer: str) -> bytes:
    """Return the hello with which `peer` answers, or whom it joined us with."""
    try:
        kind, fields = await _receive(connection)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{peer} did not answer in {JOIN_S:g} s", peer=peer) from error
    except (EOFError, OSError) as error:
        raise PeerUnreachable(f"{peer} ended a relayed stream: {error}", peer=peer) from error
    if kind == Kind.REFUSED and fields:
        raise decode_refusal(fields[0], peer)
    if kind != Kind.JOINED or len(fields) != 1:
        raise Refused(RefusalCode.BAD_MESSAGE, "expected JOINED", peer=peer)
    return fields[0]
