"""Streams through a third peer, for two that cannot dial each other: both are behind NATs.

    A                            relay R                          B
    ASK  B, hello of A,
         admission of A   --->   BRING  A, hello of A, address of A,
                                        admissions of A, R --->
                          <---   JOINED hello of B,       <---    JOINED hello of B
                                        address of B
    ================= TLS 1.3 from A to B; R copies bytes =================

A and B have a connection to R each, which they dialed. R joins a stream of A's with one that it
opens to B. It serves admitted peers alone, at the rate that its owner allows, and can read nothing
of what it carries: a *hello* is a TLS certificate, made for one start of a process, that the
sender's identity has signed. Both ends pin the certificate of the other's hello, so R can neither
be A nor B. An *address* is where the relay sees a peer come from, for a hole through its router
(`punching`).

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
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import IntEnum
from weakref import WeakValueDictionary

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from atoll.dht.identity import SIGNATURE_BYTES, Identity, verify
from atoll.dht.p2pd import P2pd, exactly, open_files, parse_address
from atoll.dht.refusals import RefusalCode
from atoll.dht.strangers import Strangers
from atoll.dht.tasks import Tasks, end
from atoll.dht.transport import (
    Check,
    DeadlineExceeded,
    PeerUnreachable,
    Refused,
    decode_refusal,
    encode_refusal,
)

logger = logging.getLogger(__name__)

VERSION = 2  # since 2, frames name where the relay sees the ends
MAX_FRAME_BYTES = 12 << 10  # two admissions of 4 KiB, a certificate of 300 bytes, a PeerID
MAX_HELLO_BYTES = 2 << 10  # a certificate has about 300
JOIN_S = 5.0  # for each frame before the two are joined
LINGER_S = 60.0  # for the second direction to end after the first, as for a call's stream
PIECE_BYTES = 64 << 10  # copied at once; what p2pd puts into a message
MAX_PER_PEER = 256  # relayed streams of one peer, as many as it may open to another
MAX_JOINING = 64  # relayed streams that one peer has begun, as an end or as a relay
SPARE_FILES = 4  # one in so many descriptors may be an end of a relayed stream
MAX_CONTEXTS = 1024  # TLS settings kept, one for each peer that was met; and addresses
MAX_ADDRESS_BYTES = 128
FOREVER = datetime.datetime(1970, 1, 1), datetime.datetime(9999, 12, 31)  # clocks may be wrong


class Kind(IntEnum):
    """The first byte of a frame."""

    ASK = 1
    BRING = 2
    JOINED = 3
    REFUSED = 4


Joined = Callable[[str, str, socket.socket, ssl.SSLContext], Awaitable[None]]
"""Takes over a stream that somebody opened to us, once its TLS stands: PeerIDs of the relay and of
the other end, socket, TLS."""


def protocol_name(run_id: str) -> str:
    """Return the libp2p protocol of a run's relayed streams."""
    return f"/atoll-relay/{VERSION}/{run_id}"


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
        """Return TLS settings that accept only the process that made `hello`.

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


class RateLimit:
    """A limit of bytes a second that senders share evenly, however many streams each has."""

    def __init__(self, mbit_s: float) -> None:
        """Allow so many Mbit/s."""
        self._bytes_s = mbit_s * 1e6 / 8
        self._turn = asyncio.Lock()  # first come, first served: senders take turns
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._free_at_s = 0.0

    async def take(self, sender: str, num_bytes: int) -> None:
        """Wait until these bytes may pass."""
        loop = asyncio.get_running_loop()
        own = self._turns.get(sender)
        if own is None:
            own = self._turns[sender] = asyncio.Lock()
        async with own, self._turn:
            wait_s = self._free_at_s - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._free_at_s = max(self._free_at_s, loop.time()) + num_bytes / self._bytes_s


class Relaying:
    """The relayed streams of one node: those it opens, those opened to it, those it carries."""

    def __init__(
        self,
        identity: Identity,
        daemon: P2pd,
        *,
        run_id: str,
        check: Check,
        admission: Callable[[], bytes],
        relay_mbit_s: float = 0.0,
    ) -> None:
        """Open streams by a daemon; `bind` tells where those that others open go.

        Args:
            identity: ours.
            daemon: carries the streams.
            run_id: names the protocol; other runs are invisible.
            check: judges the admissions of others.
            admission: returns our own.
            relay_mbit_s: what we carry for others, both directions together; 0 carries nothing.
        """
        self.protocol = protocol_name(run_id)
        self.carried_bytes = 0
        self.seen_at: OrderedDict[str, str] = OrderedDict()
        """where relays see other peers come from, by PeerID"""
        self.denied = 0
        self._secrets = Secrets(identity, run_id)
        self._check = check
        self._admission = admission
        self.mbit_s = 0.0
        self._rate: RateLimit | None = None
        self.allow(relay_mbit_s)
        self._tasks = Tasks()
        self._pairs: Counter[str] = Counter()
        self._joining: dict[socket.socket, str] = {}
        self._daemon = daemon
        self._strangers = Strangers()
        self._joined: Joined | None = None
        self._doubt: Callable[[str], None] = lambda peer: None

    def bind(self, strangers: Strangers, joined: Joined, doubt: Callable[[str], None]) -> None:
        """Work for this transport from now on.

        Args:
            strangers: bounds those without an admission, together with the transport's.
            joined: takes over streams that others open to us.
            doubt: called with the PeerID of a peer that does not answer.
        """
        self._strangers, self._joined, self._doubt = strangers, joined, doubt

    def allow(self, mbit_s: float) -> None:
        """Carry streams that begin from now on at another rate; 0 carries no more of them."""
        if mbit_s != self.mbit_s:
            self.mbit_s, self._rate = mbit_s, RateLimit(mbit_s) if mbit_s > 0 else None

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
        try:
            async with asyncio.timeout(timeout_s):
                return await self._open(relay, peer, timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer in {timeout_s:.1f} s", peer=relay) from error

    async def _open(
        self, relay: str, peer: str, timeout_s: float
    ) -> tuple[socket.socket, ssl.SSLContext]:
        connection = await self._daemon.open(relay, self.protocol, timeout_s=timeout_s)
        try:
            ask = (peer.encode(), self._secrets.hello, self._admission())
            try:
                await _send(connection, Kind.ASK, *ask)
            except ConnectionError as error:
                raise PeerUnreachable(f"{relay} ended a relayed stream", peer=relay) from error
            hello, address = await _answer(connection, relay, fields=2)
            self._note_address(peer, address)
            return connection, self._secrets.context(peer, hello, server_side=False)
        except BaseException:
            connection.close()
            raise

    # The other end, and the relay

    def accept(self, remote: str, connection: socket.socket) -> None:
        """Take over a stream of the protocol."""
        why = self._strangers.why_full(remote)
        if list(self._joining.values()).count(remote) >= MAX_JOINING:
            why = f"it has begun {MAX_JOINING} that are not joined yet"
        elif len(self._joining) >= open_files() // (2 * SPARE_FILES):
            why = f"{len(self._joining)} of all peers are not joined yet"
        if why:
            logger.info("refused a relayed stream of %s: %s", remote, why)
            connection.close()
            return
        self._joining[connection] = remote
        task = self._tasks.spawn(self._serve(remote, connection))
        task.add_done_callback(lambda _: self._served(connection))

        def drop() -> None:
            task.cancel()

        self._strangers.enter(remote, connection, drop)

    def _served(self, connection: socket.socket) -> None:
        self._joining.pop(connection, None)
        self._strangers.leave(connection)
        connection.close()

    async def _serve(self, remote: str, connection: socket.socket) -> None:
        try:
            kind, fields = await _receive(connection)
            if kind == Kind.ASK and len(fields) == 3:
                await self._carry(remote, connection, *fields)
            elif kind == Kind.BRING and len(fields) == 5:
                await self._take(remote, connection, *fields)
            else:
                raise Refused(RefusalCode.BAD_MESSAGE, "expected ASK or BRING")
        except Refused as error:
            self.denied += 1
            with suppress(OSError, TimeoutError):
                await _send(connection, Kind.REFUSED, encode_refusal(error))
        except (PeerUnreachable, OSError, EOFError, TimeoutError, ValueError) as error:
            logger.info("a relayed stream of %s ended before it began: %s", remote, error)

    async def _take(
        self,
        relay: str,
        connection: socket.socket,
        source: bytes,
        hello: bytes,
        address: bytes,
        admission: bytes,
        relay_admission: bytes,
    ) -> None:
        """Join a stream that a relay brings; any admitted peer may be one."""
        peer = source.decode("ascii")
        self._check(relay, relay_admission)
        self._strangers.admit(relay, connection)
        self._check(peer, admission)
        context = self._secrets.context(peer, hello, server_side=True)
        self._note_address(peer, address)
        await _send(connection, Kind.JOINED, self._secrets.hello)
        if self._joined is not None:
            ours = socket.socket(fileno=connection.detach())  # it has another owner now
            ours.setblocking(False)
            await self._joined(relay, peer, ours, context)

    async def _carry(
        self, source: str, near: socket.socket, target: bytes, hello: bytes, admission: bytes
    ) -> None:
        if self._rate is None:
            raise Refused(
                RefusalCode.NO_RELAY,
                "this node relays nothing; ask for a rate above 0 there (coordinator.relay_mbit, "
                "or a peer's --relay-mbit), or forward a TCP port at one of the two ends",
            )
        self._check(source, admission)
        self._strangers.admit(source, near)
        if self._pairs[source] >= MAX_PER_PEER or self._pairs.total() >= open_files() // (
            2 * SPARE_FILES
        ):
            raise Refused(RefusalCode.NO_RELAY, "too many relayed streams; try again later")
        self._pairs[source] += 1
        try:
            far = await self._bring(source, target.decode("ascii"), hello, admission)
            try:
                try:
                    (answer,) = await _answer(far, target.decode())
                except DeadlineExceeded:
                    self._doubt(target.decode())
                    raise
                await _send(near, Kind.JOINED, answer, await self._address_of(target.decode()))
                self._joining.pop(near)
                await self._copy(source, near, target.decode(), far)
            finally:
                far.close()
        finally:
            self._pairs[source] -= 1
            self._pairs += Counter()  # forget those without any

    async def _bring(
        self, source: str, target: str, hello: bytes, admission: bytes
    ) -> socket.socket:
        if target not in await self._daemon.connected():
            raise Refused(
                RefusalCode.NO_RELAY, f"{target} has no connection to this relay; another is tried"
            )
        far = await self._daemon.open(target, self.protocol, timeout_s=JOIN_S)
        try:
            rest = (await self._address_of(source), admission, self._admission())
            await _send(far, Kind.BRING, source.encode(), hello, *rest)
        except BaseException:
            far.close()
            raise
        return far

    async def _address_of(self, peer: str) -> bytes:
        """Return where a peer comes from; empty if its connection is gone."""
        found = await self._daemon.remote_addresses(peer)
        return found[0].encode()[:MAX_ADDRESS_BYTES] if found else b""

    def _note_address(self, peer: str, address: bytes) -> None:
        """Keep where a relay sees a peer; it may lie, so the peer's key decides after a dial."""
        with suppress(ValueError):
            text = address.decode("ascii")
            if text and len(text) <= MAX_ADDRESS_BYTES:
                parse_address(text)
                self.seen_at[peer] = text
                self.seen_at.move_to_end(peer)
        if len(self.seen_at) > MAX_CONTEXTS:
            self.seen_at.popitem(last=False)

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
        loop, rate = asyncio.get_running_loop(), self._rate
        buffer = memoryview(bytearray(PIECE_BYTES))
        while num_bytes := await loop.sock_recv_into(from_, buffer):
            if (rate := self._rate or rate) is not None:
                await rate.take(sender, num_bytes)
            await loop.sock_sendall(to, buffer[:num_bytes])
            self.carried_bytes += num_bytes
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


async def _answer(connection: socket.socket, peer: str, *, fields: int = 1) -> list[bytes]:
    """Return what `peer` answers: the hello of the other end, and from a relay its address."""
    try:
        kind, answer = await _receive(connection)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{peer} did not answer in {JOIN_S:g} s", peer=peer) from error
    except (EOFError, OSError) as error:
        raise PeerUnreachable(f"{peer} ended a relayed stream: {error}", peer=peer) from error
    if kind == Kind.REFUSED and answer:
        raise decode_refusal(answer[0], peer)
    if kind != Kind.JOINED or len(answer) != fields:
        raise Refused(RefusalCode.BAD_MESSAGE, "expected JOINED", peer=peer)
    return answer
