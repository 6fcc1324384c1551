"""p2pd, the libp2p process that carries our bytes: started, queried and supervised here.

hivemind can start p2pd itself, but does not notice its death and leaves connections of failed
requests open. So we start it, and hivemind's DHT joins the running one (`P2P.replicate`). The
daemon ends by itself when its owner's process is gone, even after a SIGKILL.

A request to the daemon is a connection to its UNIX socket with one protobuf each way, both after a
varint of their length. After STREAM_OPEN the connection *is* the stream; for streams from others
the daemon connects to a socket of ours and sends a StreamInfo first. The remote PeerID there was
authenticated by libp2p (TLS or Noise).

Errors::

    P2pdError(PeerUnreachable)    p2pd did not start, or answered a request with an error, or
    │                             no socket can be had
    └── P2pdGone                  p2pd is not running: no peer can be reached
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from atoll.dht.bindings import P2PD_PATH, Multiaddr, PeerID, p2pd_pb2
from atoll.dht.folders import claim_folder, give_up_folder
from atoll.dht.identity import Identity
from atoll.dht.tasks import end, race
from atoll.dht.transport import PeerUnreachable

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1 << 20  # LIST_PEERS of a thousand peers is a tenth of it
STARTUP_S = 60.0  # for a busy machine; usually 0.2 s
STOP_S = 5.0  # from SIGTERM to SIGKILL
LISTEN_BACKLOG = 256  # streams that p2pd may bring before we accept them
ACCEPT_RETRY_S = 1.0  # when accepting failed, most likely out of descriptors
GREETING_S = 10.0  # for p2pd to name the peer whose stream it brings
FOLDER_PREFIX = "atoll-p2pd-"
# Settings of p2pd, unless our own environment names others. Beyond its memory limit Go collects
# garbage sooner: without it 45,000 silent streams of strangers in a minute took 190 MB for good, at
# 128 MiB still more than 100. Near the limit up to half of p2pd's time is for garbage, so that the
# coordinator of very many peers may want a higher one.
DEFAULTS = {"GOLOG_LOG_LEVEL": "error", "GOMEMLIMIT": "96MiB"}

Control = tuple[socket.socket, Any]
Accept = Callable[[str, socket.socket], None]
"""Takes over a stream: PeerID of the peer that opened it, non-blocking socket."""
Greeting = tuple[str, str]
"""PeerID of the peer that opened a stream, and its protocol."""


class P2pdError(PeerUnreachable):
    """p2pd did not start, or answered a request with an error."""


class P2pdGone(P2pdError):
    """p2pd is not running."""


@dataclass(frozen=True, kw_only=True)
class P2pdOptions:
    """Settings with which a p2pd is started."""

    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    """Multiaddrs to listen on; port 0 means any, and the chosen one is kept over restarts."""
    announce: tuple[str, ...] = ()
    """Multiaddrs announced for others to dial, if they differ."""
    true_source: Callable[[str], str] = str
    """Returns the multiaddr of a connection's true source, if another process forwards it."""

    @property
    def is_loopback_only(self) -> bool:
        """True if no address leaves this machine."""
        return all(a.startswith(("/ip4/127.", "/ip6/::1/")) for a in self.listen)


def command(control: Path, key: Path, options: P2pdOptions) -> list[str]:
    """Return p2pd's command line."""
    wide = int(not options.is_loopback_only)
    arguments = [
        f"-listen=/unix{control}",
        f"-id={key}",
        f"-hostAddrs={','.join(options.listen)}",
        "-dhtServer=1",
        "-connManager=1",
        "-tls=1",
        "-idleTimeout=60s",
        "-persistentConnMaxMsgSize=4194304",
        "-relay=0",  # `dht/relaying.py` relays, for admitted peers alone
        f"-autonat={wide}",
        "-natPortMap=0",  # `dht/upnp.py` asks the router, before others are told of an address
    ]
    if options.announce:
        arguments.append(f"-announceAddrs={','.join(options.announce)}")
    return [str(P2PD_PATH), *arguments]


class P2pd:
    """A running p2pd, created by `P2pd.start`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        folder: Path,
        lock: IO[bytes],
        options: P2pdOptions,
    ) -> None:
        self.process = process
        self.options = options
        self.peer_id = ""
        self.addresses: list[str] = []
        """Multiaddrs with /p2p/ at which we can be dialed."""
        self._folder = folder
        self._lock = lock
        self._control = folder / "d.sock"
        self._log: deque[str] = deque(maxlen=20)
        self._ready = asyncio.Event()
        # Not cancelled: `close` awaits it after the process, to hear its last words.
        self._reader = asyncio.create_task(self._read_output())
        self._listener: socket.socket | None = None
        self._greeters: set[asyncio.Task[Greeting]] = set()
        self._accepts: dict[str, Accept] = {}

    @classmethod
    async def start(cls, identity: Identity, options: P2pdOptions) -> P2pd:
        """Start p2pd with this identity.

        Raises:
            P2pdError: it did not come up; the message holds its last words.
        """
        raise_open_files()
        try:
            folder, lock = claim_folder(FOLDER_PREFIX)
        except OSError as error:
            raise P2pdError(f"cannot make a folder for p2pd: {error}") from error
        key = folder / "key"
        try:
            key.touch(mode=0o600)
            key.write_bytes(identity.key_file())
            process = await asyncio.create_subprocess_exec(
                *command(folder / "d.sock", key, options),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=DEFAULTS | os.environ,
                process_group=0,  # Ctrl-C must not reach p2pd: it carries our goodbye
            )
        except OSError as error:
            lock.close()
            shutil.rmtree(folder)
            raise P2pdError(f"cannot run p2pd at {P2PD_PATH}: {error}") from error
        daemon = cls(process, folder, lock, options)
        try:
            await daemon._come_up()
        except BaseException:
            await daemon.close()
            raise
        return daemon

    @property
    def pid(self) -> int:
        """Process id of p2pd."""
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        """False once p2pd has ended."""
        return self.process.returncode is None

    @property
    def control_maddr(self) -> Multiaddr:
        """Address at which hivemind's `P2P.replicate` finds the daemon."""
        return Multiaddr(f"/unix{self._control}")

    async def _come_up(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(STARTUP_S):
                await race(self._ready.wait(), self.process.wait())
        if not self._ready.is_set():
            await asyncio.sleep(0)  # for its last words
            words = " | ".join(self._log) or "nothing"
            how = f"did not start within {STARTUP_S:g} s" if self.is_alive else "ended at its start"
            raise P2pdError(f"p2pd {how}; its output: {words}")
        found = await self._look(timeout_s=10)
        self.options = replace(self.options, listen=_with_ports(self.options.listen, found))
        (self._folder / "key").unlink()  # p2pd has read it; no second copy of the key stays on disk

    async def _look(self, timeout_s: float) -> list[str]:
        """Ask p2pd who it is and where; return its addresses without the PeerID."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY)
        reply = await self._ask(request, timeout_s=timeout_s)
        self.peer_id = str(PeerID(reply.identify.id))
        found = [str(Multiaddr(raw)) for raw in reply.identify.addrs]
        self.addresses = [f"{address}/p2p/{self.peer_id}" for address in found]
        return found

    async def _read_output(self) -> None:
        assert self.process.stdout is not None
        with suppress(ValueError):  # a line longer than the reader's limit
            async for line in self.process.stdout:
                text = line.rstrip().decode(errors="replace")
                self._log.append(text)
                logger.debug("p2pd: %s", text)
                if text.startswith("Peer ID:"):  # p2pd gives no other sign that it serves
                    self._ready.set()

    # Requests

    async def ping(self, *, timeout_s: float) -> None:
        """Return if the daemon answers, else raise. Addresses that have changed are taken over."""
        await self._look(timeout_s)

    async def connected(self, *, timeout_s: float = 5.0) -> set[str]:
        """Return the PeerIDs with which there is a connection."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
        reply = await self._ask(request, timeout_s=timeout_s)
        return {str(PeerID(peer.id)) for peer in reply.peers}

    async def remote_addresses(self, peer: str, *, timeout_s: float = 5.0) -> list[str]:
        """Return the addresses from which a connected peer comes, as we see them."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
        reply = await self._ask(request, timeout_s=timeout_s)
        wanted = PeerID.from_base58(peer).to_bytes()
        found = (address for each in reply.peers if each.id == wanted for address in each.addrs)
        return [self.options.true_source(str(Multiaddr(address))) for address in found]

    async def all_remote_addresses(self, *, timeout_s: float = 5.0) -> dict[str, list[str]]:
        """Return the addresses from which each connected peer comes, by PeerID."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
        reply = await self._ask(request, timeout_s=timeout_s)
        found: dict[str, list[str]] = {}
        for each in reply.peers:
            addresses = found.setdefault(str(PeerID(each.id)), [])
            addresses += [self.options.true_source(str(Multiaddr(raw))) for raw in each.addrs]
        return found

    async def dial(self, peer: str, addresses: Sequence[str], *, timeout_s: float) -> None:
        """Connect to a peer; do nothing if there is a connection."""
        dial = p2pd_pb2.ConnectRequest(
            peer=PeerID.from_base58(peer).to_bytes(),
            addrs=[parse_address(address).to_bytes() for address in addresses],
            timeout=max(1, round(timeout_s)),
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=dial)
        await self._ask(request, timeout_s=timeout_s)

    async def disconnect(self, peer: str, *, timeout_s: float = 5.0) -> None:
        """Close all connections to a peer."""
        parting = p2pd_pb2.DisconnectRequest(peer=PeerID.from_base58(peer).to_bytes())
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=parting)
        await self._ask(request, timeout_s=timeout_s)

    async def open(self, peer: str, protocol: str, *, timeout_s: float) -> socket.socket:
        """Open a stream to the peer's handler of `protocol`, as a non-blocking socket."""
        opening = p2pd_pb2.StreamOpenRequest(
            peer=PeerID.from_base58(peer).to_bytes(),
            proto=[protocol],
            timeout=max(1, round(timeout_s)),
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)
        async with asyncio.timeout(timeout_s):
            connection, _ = await self._request(request)
        return connection

    async def listen(self, accepts: Mapping[str, Accept]) -> None:
        """Pass every stream of a protocol to its `accept(remote, socket)`. Call it once."""
        self._accepts = dict(accepts)
        path = self._folder / "c.sock"
        self._listener = _unix_socket()
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen(LISTEN_BACKLOG)
        self._watch(self._listener)
        handler = p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{path}").to_bytes(), proto=list(accepts), balanced=False
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=handler)
        await self._ask(request, timeout_s=10)

    def _watch(self, listener: socket.socket) -> None:
        if listener is self._listener:  # `_rest` may call after `close`
            loop = asyncio.get_running_loop()
            loop.add_reader(listener, self._accept_all, listener)

    def _accept_all(self, listener: socket.socket) -> None:
        try:
            while True:
                connection, _ = listener.accept()
                connection.setblocking(False)
                self._greeters.add(task := asyncio.create_task(_greet(connection)))
                task.add_done_callback(partial(self._greeted, connection))
        except BlockingIOError:
            pass
        except OSError as error:
            self._rest(listener, error)

    def _rest(self, listener: socket.socket, error: OSError) -> None:
        """Pause accepting, most likely out of descriptors; waiting streams are taken later."""
        logger.warning(
            "cannot accept streams: %s; retrying in %g s. If this repeats, allow more open files",
            error,
            ACCEPT_RETRY_S,
        )
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(ACCEPT_RETRY_S, self._watch, listener)

    def _greeted(self, connection: socket.socket, task: asyncio.Task[Greeting]) -> None:
        self._greeters.discard(task)
        if task.cancelled():
            connection.close()
        elif (error := task.exception()) is not None:
            connection.close()
            logger.warning("a stream from p2pd did not start with a greeting: %r", error)
        else:
            remote, protocol = task.result()
            self._accepts[protocol](remote, connection)

    async def _ask(self, request: Any, *, timeout_s: float) -> Any:  # noqa: ANN401 - protobuf
        async with asyncio.timeout(timeout_s):
            connection, reply = await self._request(request)
        connection.close()
        return reply

    async def _request(self, request: Any) -> Control:  # noqa: ANN401 - protobuf
        connection = _unix_socket()
        try:
            connection.setblocking(False)
            return connection, await self._exchange(connection, request)
        except BaseException as error:
            connection.close()
            # A TimeoutError is an OSError, but a slow p2pd is not a dead one.
            if isinstance(error, (OSError, EOFError)) and not isinstance(error, TimeoutError):
                raise P2pdGone(f"p2pd of {self.peer_id} does not answer: {error}") from error
            raise

    async def _exchange(self, connection: socket.socket, request: Any) -> Any:  # noqa: ANN401
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, str(self._control))
        data = request.SerializeToString()
        await loop.sock_sendall(connection, _varint(len(data)) + data)
        reply = p2pd_pb2.Response()
        reply.ParseFromString(await _receive(connection))
        if reply.type == p2pd_pb2.Response.ERROR:
            raise P2pdError(reply.error.msg)
        return reply

    async def close(self) -> None:
        """Stop p2pd and remove its folder. Idempotent."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        await end(*self._greeters, expected=(Exception,))  # `_greeted` logs every failure
        await self._stop()
        await self._reader  # its pipe ends with the process
        give_up_folder(self._folder, self._lock, FOLDER_PREFIX)

    async def _stop(self) -> None:
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self.process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


def _unix_socket() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # most likely out of descriptors
        raise P2pdError(
            f"cannot open a socket to p2pd: {error.strerror}; allow more open files"
        ) from error


def raise_open_files() -> None:
    """Allow as many open files as this process may have; p2pd inherits it.

    Each stream takes a descriptor here and another in p2pd, and the usual limit is 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # a system may have a lower limit than it names
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files() -> int:
    """Return how many files this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def parse_address(address: str) -> Multiaddr:
    """Return the multiaddr without its /p2p/ part. Raises ValueError."""
    try:
        return Multiaddr(address.split("/p2p/")[0])
    except Exception as error:
        raise ValueError(
            f"address {address!r}: expected a multiaddr such as /ip4/1.2.3.4/tcp/1234"
        ) from error


def _with_ports(listen: tuple[str, ...], found: Sequence[str]) -> tuple[str, ...]:
    fixed = []
    for address in listen:
        alike = [a for a in found if a.startswith(address[:5])]  # of IPv4, or of IPv6
        ports = [a.rsplit("/tcp/", 1)[1] for a in alike if "/tcp/" in a]
        stem, _, port = address.rpartition("/tcp/")
        same = [a for a in found if a.startswith(f"{stem}/tcp/")]
        new = same[0].rsplit("/tcp/", 1)[1] if same else (ports[0] if ports else port)
        fixed.append(f"{stem}/tcp/{new}" if port == "0" and new.isdigit() else address)
    return tuple(fixed)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


async def _greet(connection: socket.socket) -> Greeting:
    """Return who opened a stream from p2pd, and its protocol."""
    info = p2pd_pb2.StreamInfo()
    async with asyncio.timeout(GREETING_S):
        info.ParseFromString(await _receive(connection))
    return str(PeerID(info.peer)), info.proto


async def _receive(connection: socket.socket) -> bytes:
    size = shift = 0
    while True:
        (byte,) = await exactly(connection, 1)
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if shift > 28:
            raise P2pdError("p2pd sent a length of more than 4 bytes; is it p2pd?")
    if size > MAX_REPLY_BYTES:
        raise P2pdError(f"p2pd sent {size} bytes, expected at most {MAX_REPLY_BYTES}")
    return await exactly(connection, size)


async def exactly(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes of a non-blocking socket. Raises EOFError if it ends before."""
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < size:
        piece = await loop.sock_recv(connection, size - len(data))
        if not piece:
            raise EOFError(f"it closed the connection after {len(data)} of {size} bytes")
        data += piece
    return bytes(data)
