"""Ask the router of a home to let others in to a port: UPnP's Internet Gateway Device.

    M-SEARCH            by UDP to 239.255.255.250:1900; routers answer with the LOCATION of their
                        description (SSDP, UPnP Device Architecture 1.1, section 1.3)
    GET description     names the services, of which WANIPConnection or WANPPPConnection maps ports
    POST control URL    SOAP: AddPortMapping, DeletePortMapping (WANIPConnection:1, section 2.4)

Anybody on the local network can answer. So a description is read only from the host that answered,
at a private address; an answer has 2 KiB at most and a document 64 KiB; all of it has one deadline;
XML with a document type, and thus with entities, is refused. A router that confirms a mapping is
not believed either: the port counts as open once the coordinator has dialed it.

Exceptions:

    UpnpError(Exception)    the router cannot be asked, or refuses
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin
from xml.parsers import expat

SSDP = ("239.255.255.250", 1900)
SEARCH_S = 2.0  # routers answer within MX, one second
STEP_S = 3.0  # for one request to the router
CLOSE_S = 2.0  # to take a mapping back; its lease ends it in any case
LEASE_S = 3600  # a peer that was killed leaves its mapping behind for at most so long
RENEW_S = 1200.0  # two renewals may fail
MAX_ANSWERS = 16
MAX_ANSWER_BYTES = 2048
MAX_DOCUMENT_BYTES = 64 << 10
ONLY_PERMANENT = 725  # OnlyPermanentLeasesSupported: old routers
TARGETS = (
    "urn:schemas-upnp-org:device:InternetGatewayDevice:1",
    "urn:schemas-upnp-org:device:InternetGatewayDevice:2",
)
_SERVICE = re.compile(r"urn:schemas-upnp-org:service:WAN(?:IP|PPP)Connection:[12]")
_URL = re.compile(r"http://(?P<host>[0-9.]{7,15})(?::(?P<port>[0-9]{1,5}))?(?P<path>/[!-~]*)?")
_LOCATION = re.compile(rb"^location:[ \t]*([!-~]+)[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[ \r]")
_CHUNKED = re.compile(rb"^transfer-encoding:[ \t]*chunked[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)


class UpnpError(Exception):
    """The router cannot be asked, or refuses; `code` is UPnP's, 0 if there is none."""

    def __init__(self, text: str, code: int = 0) -> None:
        """Say what happened."""
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Url:
    """An HTTP URL on the local network."""

    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str, host: str) -> Url:
        """Read a URL of this host. Raises UpnpError for any other."""
        found = _URL.fullmatch(text)
        port = int(found["port"] or 80) if found else 0
        if found is None or found["host"] != host or not 0 < port < 65536:
            raise UpnpError(f"expected a URL of {host}, got {text[:80]!r}")
        return cls(host=host, port=port, path=found["path"] or "/")

    def __str__(self) -> str:
        return f"http://{self.host}:{self.port}{self.path}"


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """A router's service that maps ports."""

    control: Url
    service: str
    inside: str
    """our address in its network"""

    async def map(self, port: int) -> None:
        """Let others in to a TCP port of ours, under the same number.

        Raises:
            UpnpError: it refuses, or does not answer.
        """
        try:
            await self._add(port, LEASE_S)
        except UpnpError as error:
            if error.code != ONLY_PERMANENT:
                raise
            await self._add(port, 0)

    async def unmap(self, port: int) -> None:
        """Take the mapping back. Raises UpnpError."""
        where = {"NewRemoteHost": "", "NewExternalPort": str(port), "NewProtocol": "TCP"}
        await self._call("DeletePortMapping", where)

    async def _add(self, port: int, lease_s: int) -> None:
        await self._call(
            "AddPortMapping",
            {
                "NewRemoteHost": "",
                "NewExternalPort": str(port),
                "NewProtocol": "TCP",
                "NewInternalPort": str(port),
                "NewInternalClient": self.inside,
                "NewEnabled": "1",
                "NewPortMappingDescription": "Atoll",
                "NewLeaseDuration": str(lease_s),
            },
        )

    async def _call(self, action: str, arguments: dict[str, str]) -> None:
        fields = "".join(f"<{name}>{value}</{name}>" for name, value in arguments.items())
        body = (
            '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
            's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
            f'<u:{action} xmlns:u="{self.service}">{fields}</u:{action}></s:Body></s:Envelope>'
        ).encode()
        status, answer = await _request(
            self.control,
            "POST",
            f'Content-Type: text/xml; charset="utf-8"\r\nSOAPAction: "{self.service}#{action}"\r\n',
            body,
        )
        if status == 200:
            return
        faults = records(answer, "UPnPError") if answer.lstrip().startswith(b"<") else []
        number = faults[0].get("errorCode", "") if faults else ""
        code = int(number) if re.fullmatch(r"[0-9]{1,4}", number) else 0
        raise UpnpError(f"the router refuses {action} ({code or f'HTTP {status}'})", code)


async def find_gateway(inside: str, *, ssdp: tuple[str, int] = SSDP) -> Gateway:
    """Return the first router that answers and maps ports.

    Args:
        inside: our address in the local network, of IPv4.
        ssdp: address and port to ask at.

    Raises:
        UpnpError: there is none.
    """
    answers: asyncio.Queue[tuple[bytes, str]] = asyncio.Queue(MAX_ANSWERS)
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.create_datagram_endpoint(
            lambda: _Searching(answers), sock=_multicast_socket(inside)
        )
    except OSError as error:
        raise UpnpError(f"cannot ask for a router: {error}") from None
    refused: UpnpError | None = None
    try:
        async with asyncio.timeout(SEARCH_S):
            for target in TARGETS:
                transport.sendto(_search(target), ssdp)
            asked: set[str] = set()
            while True:
                answer, host = await answers.get()
                try:
                    url = location(answer, host)
                    if str(url) not in asked:
                        asked.add(str(url))
                        return await _described(url, inside)
                except UpnpError as error:
                    refused = error
    except TimeoutError:
        raise refused or UpnpError("no router answers") from None
    finally:
        transport.close()


class _Searching(asyncio.DatagramProtocol):
    def __init__(self, answers: asyncio.Queue[tuple[bytes, str]]) -> None:
        self._answers = answers

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        with suppress(asyncio.QueueFull):  # a flood: the first few suffice
            self._answers.put_nowait((data[: MAX_ANSWER_BYTES + 1], str(addr[0])))

    def error_received(self, exc: Exception) -> None:
        """Ignore that a network has no way for multicast: nobody answers."""


def _multicast_socket(inside: str) -> socket.socket:
    asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)
        asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(inside))
        asking.setblocking(False)
        asking.bind((inside, 0))
    except BaseException:
        asking.close()
        raise
    return asking


def _search(target: str) -> bytes:
    return (
        f"M-SEARCH * HTTP/1.1\r\nHOST: {SSDP[0]}:{SSDP[1]}\r\n"
        f'MAN: "ssdp:discover"\r\nMX: 1\r\nST: {target}\r\n\r\n'
    ).encode()


def location(answer: bytes, host: str) -> Url:
    """Return where the description is of a router that answered from `host`.

    Raises:
        UpnpError: it is no such answer, or names another host.
    """
    found = _LOCATION.search(answer)
    is_answer = len(answer) <= MAX_ANSWER_BYTES and answer.startswith(b"HTTP/1.1 200")
    if not is_answer or found is None or not ipaddress.ip_address(host).is_private:
        raise UpnpError(f"{host} sent no answer of a router")
    return Url.parse(found[1].decode(), host)


async def _described(url: Url, inside: str) -> Gateway:
    status, document = await _request(url, "GET")
    if status != 200:
        raise UpnpError(f"{url} answers with HTTP {status}")
    for service in records(document, "service"):
        kind, control = service.get("serviceType", ""), service.get("controlURL", "")
        if _SERVICE.fullmatch(kind) and control:
            place = Url.parse(urljoin(str(url), control), url.host)
            return Gateway(control=place, service=kind, inside=inside)
    raise UpnpError(f"{url} describes nothing that maps ports")


def records(document: bytes, container: str) -> list[dict[str, str]]:
    """Return the texts in each element of a name, by the names of its children.

    Raises:
        UpnpError: it is no XML, or has a document type.
    """
    found: list[dict[str, str]] = []
    current: dict[str, str] | None = None
    text: list[str] = []

    def start(name: str, _: dict[str, str]) -> None:
        nonlocal current
        text.clear()
        if name.rpartition(":")[2] == container:
            current = {}

    def end(name: str) -> None:
        nonlocal current
        local = name.rpartition(":")[2]
        if current is None:
            return
        if local == container:
            found.append(current)
            current = None
        else:
            current.setdefault(local, "".join(text).strip())
        text.clear()

    def refuse(*_: object) -> None:
        raise UpnpError("the router sent XML with a document type")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = text.append
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(document, True)
    except (expat.ExpatError, ValueError, LookupError) as error:  # an unknown encoding
        raise UpnpError(f"the router sent no XML: {error}") from None
    return found


async def _request(
    url: Url, method: str, headers: str = "", body: bytes = b""
) -> tuple[int, bytes]:
    """Return status and body of one HTTP request; no redirect is followed. Raises UpnpError."""
    head = (
        f"{method} {url.path} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n{headers}\r\n"
    )
    try:
        async with asyncio.timeout(STEP_S):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            try:
                writer.write(head.encode() + body)
                return await _answer(reader)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError) as error:
        why = str(error) or "no answer in time"
        raise UpnpError(f"{url} cannot be asked: {why}") from None


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")  # 64 KiB at most, the reader's limit
    found = _STATUS.match(head)
    if found is None:
        raise UpnpError("the router sent no answer of HTTP")
    length = re.search(rb"^content-length:[ \t]*([0-9]{1,9})[ \t]*\r$", head, re.I | re.M)
    if _CHUNKED.search(head):
        return int(found[1]), await _chunks(reader)
    wanted = int(length[1]) if length is not None else MAX_DOCUMENT_BYTES + 1
    if length is not None and wanted > MAX_DOCUMENT_BYTES:
        raise UpnpError(f"expected at most {MAX_DOCUMENT_BYTES} bytes, the router has {wanted}")
    body = bytearray()
    while len(body) < wanted and (piece := await reader.read(wanted - len(body))):
        body += piece
    if len(body) > MAX_DOCUMENT_BYTES:
        raise UpnpError(f"expected at most {MAX_DOCUMENT_BYTES} bytes, the router has more")
    return int(found[1]), bytes(body)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while True:
        size = re.match(rb"([0-9a-fA-F]{1,5})[;\r]", await reader.readuntil(b"\r\n"))
        if size is None or len(body) + int(size[1], 16) > MAX_DOCUMENT_BYTES:
            raise UpnpError(f"expected chunks of at most {MAX_DOCUMENT_BYTES} bytes together")
        if not int(size[1], 16):
            return bytes(body)
        body += await reader.readexactly(int(size[1], 16))
        await reader.readuntil(b"\r\n")


Find = Callable[[str], Awaitable[Gateway]]
"""Returns the router of the network in which an address is ours. Raises UpnpError."""


class Forwarding:
    """One port that a router forwards to this machine, from `open` to `close`."""

    def __init__(self, find: Find = find_gateway) -> None:
        """Forward nothing yet."""
        self.port = 0
        """the port that is forwarded; 0 if there is none"""
        self.refusal = ""
        """why the last try failed"""
        self._find = find
        self._gateway: Gateway | None = None

    async def search(self, inside: str) -> None:
        """Look for a router, and forget the one of another network.

        Args:
            inside: our address in the local network, of IPv4.
        """
        await self.close()
        try:
            self._gateway, self.refusal = await self._find(inside), ""
        except UpnpError as error:
            self.refusal = str(error)

    async def open(self, port: int) -> bool:
        """Have a port of ours forwarded instead of the last one; return if the router agreed."""
        gateway = self._gateway
        await self.close()
        if gateway is None:
            return False
        try:
            await gateway.map(port)
        except UpnpError as error:
            self.refusal = str(error)
            return False
        self._gateway, self.port = gateway, port
        return True

    async def renew(self) -> None:
        """Have the port forwarded for another hour; also after the router was restarted."""
        if self._gateway is not None and self.port:
            with suppress(UpnpError):  # the next time will do
                await self._gateway.map(self.port)

    async def keep(self) -> None:
        """Renew for ever."""
        while True:
            await asyncio.sleep(RENEW_S)
            await self.renew()

    async def close(self) -> None:
        """Take the mapping back. Idempotent."""
        gateway, self._gateway = self._gateway, None
        port, self.port = self.port, 0
        if gateway is not None and port:
            with suppress(UpnpError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await gateway.unmap(port)
