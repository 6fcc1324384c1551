"""The least of libp2p that opens streams: multistream, TLS 1.3 with libp2p's extension, yamux.

Every frame of yamux is `version u8 | type u8 | flags u16 | stream u32 | length u32`, big-endian.
"""

import asyncio
import contextlib
import datetime
import ssl
import struct
import tempfile

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID, ObjectIdentifier

DATA, WINDOW, PING, GO_AWAY = 0, 1, 2, 3
SYN, ACK = 1, 2
WINDOW_BYTES = 256 << 10


def der(tag, content):
    size = len(content)
    length = bytes([size]) if size < 128 else bytes([0x81, size])
    return tag + length + content


def tls():
    """Return a TLS context with a new PeerID."""
    host, key = Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())
    spki = key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    public = bytes.fromhex("08011220") + host.public_key().public_bytes_raw()
    signature = host.sign(b"libp2p-tls-handshake:" + spki)
    extension = der(b"\x30", der(b"\x04", public) + der(b"\x04", signature))
    name = x509.Name([x509.NameAttribute(NameOID.SERIAL_NUMBER, "1")])
    oid = ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2020, 1, 1))
        .not_valid_after(datetime.datetime(2090, 1, 1))
        .add_extension(x509.UnrecognizedExtension(oid, extension), critical=True)
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    with tempfile.NamedTemporaryFile() as file:
        file.write(certificate.public_bytes(serialization.Encoding.PEM))
        file.write(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        file.flush()
        context.load_cert_chain(file.name)
    return context


def line(text):
    data = text.encode() + b"\n"
    return bytes([len(data)]) + data


class Stranger:
    """A connection with a PeerID that nobody knows."""

    async def open(self, host, port):
        self._reader, self._writer = await asyncio.open_connection(host, port)
        await self._select("/tls/1.0.0")
        await self._writer.start_tls(tls())
        await self._select("/yamux/1.0.0")
        self._next = 1
        self._task = asyncio.create_task(self._answer_pings())

    async def _select(self, protocol):
        self._writer.write(line("/multistream/1.0.0") + line(protocol))
        for expected in ("/multistream/1.0.0", protocol):
            (size,) = await self._reader.readexactly(1)
            got = (await self._reader.readexactly(size)).decode().strip()
            assert got == expected, got

    async def _answer_pings(self):
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await self._reader.readexactly(12)
                _, kind, flags, _, length = struct.unpack(">BBHII", head)
                if kind == PING and flags & SYN:
                    self._writer.write(struct.pack(">BBHII", 0, PING, ACK, 0, length))
                elif kind == DATA and length:
                    await self._reader.readexactly(length)

    async def streams(self, protocol, count, first=b""):
        """Open streams of a protocol and say nothing on them but `first`."""
        data = line("/multistream/1.0.0") + line(protocol) + first
        for _ in range(count):
            number, self._next = self._next, self._next + 2
            self._writer.write(struct.pack(">BBHII", 0, WINDOW, SYN, number, WINDOW_BYTES))
            self._writer.write(struct.pack(">BBHII", 0, DATA, 0, number, len(data)) + data)
        await self._writer.drain()

    async def close(self):
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._writer.transport.abort()
        await asyncio.sleep(0)
