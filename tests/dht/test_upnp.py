"""UPnP with a router on loopback, and what others on a local network may answer instead."""

import asyncio
import re

import pytest

from atoll.dht import upnp
from atoll.dht.tasks import end
from atoll.dht.upnp import (
    MAX_ANSWER_BYTES,
    MAX_DOCUMENT_BYTES,
    Forwarding,
    UpnpError,
    Url,
    find_gateway,
    location,
    records,
)

HERE = "127.0.0.1"
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><device><serviceList>
<service><serviceType>urn:schemas-upnp-org:service:Layer3Forwarding:1</serviceType>
<controlURL>/other</controlURL></service>
<service><serviceType>{SERVICE}</serviceType><controlURL>/control</controlURL>
<SCPDURL>/s.xml</SCPDURL></service></serviceList></device></root>"""


class Router(asyncio.DatagramProtocol):
    """An Internet Gateway Device; tests change what it answers."""

    def __init__(self):
        self.mapped, self.calls = {}, []
        self.description, self.permanent_only, self.is_chunked = DESCRIPTION.encode(), False, False
        self.place, self.head = "http://{host}:{port}/rootDesc.xml", ""

    async def __aenter__(self):
        loop = asyncio.get_running_loop()
        self.server = await asyncio.start_server(self.serve, HERE, 0)
        self.port = self.server.sockets[0].getsockname()[1]
        self.udp, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(HERE, 0))
        self.ssdp = self.udp.get_extra_info("sockname")
        return self

    async def __aexit__(self, *exc):
        self.udp.close()
        self.server.close()
        await self.server.wait_closed()

    def datagram_received(self, data, addr):
        if b'MAN: "ssdp:discover"' in data:
            place = self.place.format(host=HERE, port=self.port)
            self.udp.sendto(f"HTTP/1.1 200 OK\r\nLocation: {place}\r\n\r\n".encode(), addr)

    async def serve(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(re.search(r"Content-Length: (\d+)", head)[1])
        body = (await reader.readexactly(length)).decode()
        status, answer = self.answer(head, body)
        if self.is_chunked:
            size = f"{len(answer):x}\r\n".encode()
            frame = b"Transfer-Encoding: chunked\r\n\r\n" + size + answer + b"\r\n0\r\n\r\n"
        else:
            frame = f"Content-Length: {len(answer)}\r\n\r\n".encode() + answer
        writer.write(self.head.encode() or f"HTTP/1.1 {status} X\r\n".encode() + frame)
        writer.close()
        await writer.wait_closed()

    def answer(self, head, body):
        if head.startswith("GET /rootDesc.xml"):
            return 200, self.description
        self.calls.append(action := re.search(rf'SOAPAction: "{SERVICE}#(\w+)"', head)[1])
        told = dict(re.findall(r"<(New\w+)>([^<]*)</", body))
        port = int(told["NewExternalPort"])
        if action == "DeletePortMapping":
            del self.mapped[port]
        elif self.permanent_only and told["NewLeaseDuration"] != "0":
            fault = "<UPnPError><errorCode>725</errorCode></UPnPError>"
            return 500, f"<s:Envelope xmlns:s='x'><detail>{fault}</detail></s:Envelope>".encode()
        else:
            self.mapped[port] = (told["NewInternalClient"], int(told["NewInternalPort"]))
        return 200, b"<ok/>"


def with_router(test, **settings):
    async def main():
        async with Router() as router:
            for name, value in settings.items():
                setattr(router, name, value)
            await test(router)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(upnp, "SEARCH_S", 0.3)


@pytest.mark.parametrize("settings", [{}, {"is_chunked": True}], ids=["length", "chunked"])
def test_a_port_is_forwarded_until_the_peer_leaves(settings):
    async def test(router):
        forwarding = Forwarding(lambda inside: find_gateway(inside, ssdp=router.ssdp))
        await forwarding.search(HERE)
        assert await forwarding.open(4001) and router.mapped == {4001: (HERE, 4001)}
        assert await forwarding.open(4002) and router.mapped == {4002: (HERE, 4002)}
        router.mapped.clear()  # it was restarted
        await forwarding.renew()
        assert router.mapped == {4002: (HERE, 4002)}
        await forwarding.close()
        await forwarding.close()
        assert router.mapped == {} and forwarding.port == 0

    with_router(test, **settings)


def test_a_lease_is_renewed_in_time(monkeypatch):
    monkeypatch.setattr(upnp, "RENEW_S", 0.0)

    async def test(router):
        forwarding = Forwarding(lambda inside: find_gateway(inside, ssdp=router.ssdp))
        await forwarding.search(HERE)
        await forwarding.open(4001)
        router.mapped.clear()
        keeping = asyncio.ensure_future(forwarding.keep())
        async with asyncio.timeout(5):
            while not router.mapped:
                await asyncio.sleep(0)
        await end(keeping)
        await forwarding.close()

    with_router(test)


def test_a_router_that_knows_no_leases_forwards_for_good():
    async def test(router):
        gateway = await find_gateway(HERE, ssdp=router.ssdp)
        await gateway.map(4001)
        assert router.calls == ["AddPortMapping"] * 2 and 4001 in router.mapped

    with_router(test, permanent_only=True)


def test_a_refusal_is_said_with_its_code():
    async def test(router):
        router.answer = lambda head, body: (
            (200, router.description)
            if head.startswith("GET")
            else (500, b"<a><UPnPError><errorCode>718</errorCode></UPnPError></a>")
        )
        forwarding = Forwarding(lambda inside: find_gateway(inside, ssdp=router.ssdp))
        await forwarding.search(HERE)
        assert not await forwarding.open(4001)
        assert forwarding.refusal == "the router refuses AddPortMapping (718)"

    with_router(test)


BOMB = b'<!DOCTYPE a [<!ENTITY x "ha"><!ENTITY y "&x;&x;">]><a>&y;</a>'


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"description": BOMB}, "document type"),
        ({"description": b"<root>"}, "no XML"),
        ({"description": b"<?xml version='1.0' encoding='x-none'?><a/>"}, "no XML"),
        (
            {"description": DESCRIPTION.replace(">/control<", ">http://10.0.0.9/c<").encode()},
            "a URL",
        ),
        ({"description": DESCRIPTION.replace("WANIP", "Other").encode()}, "nothing that maps"),
        ({"description": b" " * (MAX_DOCUMENT_BYTES + 1)}, "at most"),
        ({"description": b" " * (MAX_DOCUMENT_BYTES + 1), "is_chunked": True}, "at most"),
        ({"head": f"HTTP/1.1 200 OK\r\n\r\n{' ' * (MAX_DOCUMENT_BYTES + 1)}"}, "at most"),
        ({"head": "HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n"}, "at most"),
        ({"head": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n"}, "chunks"),
        ({"head": "HTTP/1.1 301 Moved\r\nLocation: http://10.0.0.9/\r\n\r\n"}, "HTTP 301"),
        ({"head": "SSH-2.0\r\n\r\n"}, "no answer of HTTP"),
        ({"head": "HTTP/1.1 200 OK\r\nX"}, "cannot be asked"),
        ({"place": "http://10.0.0.9/"}, "a URL"),
        ({"place": "file:///etc/passwd"}, "a URL"),
        ({"place": "http://{host}:{port}@10.0.0.9/"}, "a URL"),
    ],
)
def test_no_answer_of_the_local_network_does_harm(settings, why):
    async def test(router):
        with pytest.raises(UpnpError, match=why):
            await find_gateway(HERE, ssdp=router.ssdp)

    with_router(test, **settings)


def test_a_router_that_answers_nothing_is_left_in_time(monkeypatch):
    monkeypatch.setattr(upnp, "STEP_S", 0.05)

    async def test(router):
        async def hang(reader, writer):
            await reader.read()
            writer.close()

        router.serve = hang
        router.server.close()
        router.server = await asyncio.start_server(hang, HERE, 0)
        router.port = router.server.sockets[0].getsockname()[1]
        with pytest.raises(UpnpError, match="no answer in time"):
            await find_gateway(HERE, ssdp=router.ssdp)

    with_router(test)


def test_silence_is_no_router():
    async def test(router):
        router.udp.close()
        with pytest.raises(UpnpError, match="no router answers"):
            await find_gateway(HERE, ssdp=router.ssdp)

    with_router(test)


@pytest.mark.parametrize(
    ("answer", "host"),
    [
        (b"HTTP/1.1 200 OK\r\nLOCATION: http://8.8.8.8/x\r\n\r\n", "8.8.8.8"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "10.0.0.1"),
        (b"NOTIFY * HTTP/1.1\r\nLOCATION: http://10.0.0.1/x\r\n\r\n", "10.0.0.1"),
        (b"HTTP/1.1 200 OK\r\nLOCATION: http://10.0.0.1/\r\n\r\n" + b"x" * 2048, "10.0.0.1"),
        (b"HTTP/1.1 200 OK\r\nLOCATION: http://10.0.0.1:99999/\r\n\r\n", "10.0.0.1"),
        (b"\xff" * MAX_ANSWER_BYTES, "10.0.0.1"),
    ],
    ids=["public", "no location", "no answer", "long", "port", "noise"],
)
def test_a_damaged_answer_is_refused(answer, host):
    with pytest.raises(UpnpError):
        location(answer, host)


def test_a_location_may_lack_port_and_path():
    found = location(b"HTTP/1.1 200 OK\r\nlocation:http://10.0.0.1\r\n\r\n", "10.0.0.1")
    assert found == Url(host="10.0.0.1", port=80, path="/")


def test_records_are_read_by_local_name_whatever_the_order():
    document = (
        b"<a><n:s xmlns:n='u'><n:c> 1 </n:c><d>2</d></n:s><s><d>3</d><d>4</d></s><c>5</c></a>"
    )
    assert records(document, "s") == [{"c": "1", "d": "2"}, {"d": "3"}]
