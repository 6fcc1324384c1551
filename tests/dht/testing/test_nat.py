"""Routers translate as their kinds say, and leave valid packets."""

import socket
import struct

import pytest

from atoll.dht.testing.nat import IDLE_S, KINDS, TCP, UDP, Nat, Routers

INSIDE, PUBLIC = "10.0.1.2", "11.77.0.9"
SERVER, OTHER = "11.77.0.1", "11.77.0.2"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def summed(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def packet(source, destination, *, protocol=TCP, payload=b"hello, there"):
    (src, src_port), (dst, dst_port) = source, destination
    if protocol == TCP:
        head = struct.pack(">HHIIBBHHH", src_port, dst_port, 1, 0, 5 << 4, 2, 1024, 0, 0)
        at = 16
    else:
        head = struct.pack(">HHHH", src_port, dst_port, 8 + len(payload), 0)
        at = 6
    body = bytearray(head + payload)
    addresses = socket.inet_aton(src) + socket.inet_aton(dst)
    pseudo = addresses + struct.pack(">BBH", 0, protocol, len(body))
    struct.pack_into(">H", body, at, ~summed(pseudo + bytes(body)) & 0xFFFF)
    ip = bytearray(struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(body), 7, 0, 64, protocol, 0))
    ip += addresses
    struct.pack_into(">H", ip, 10, ~summed(bytes(ip)) & 0xFFFF)
    return bytes(ip + body)


def is_valid(data):
    body = data[20:]
    pseudo = data[12:20] + struct.pack(">BBH", 0, data[9], len(body))
    return summed(data[:20]) == 0xFFFF and summed(pseudo + body) == 0xFFFF


def ends(data):
    source, destination = struct.unpack_from(">HH", data, 20)
    return (
        (socket.inet_ntoa(data[12:16]), source),
        (socket.inet_ntoa(data[16:20]), destination),
    )


def passes(nat, peer, port):
    return nat.inward(packet(peer, (PUBLIC, port))) is not None


@pytest.mark.parametrize("protocol", [TCP, UDP])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flow_goes_out_and_its_answers_come_back(kind, protocol):
    nat = Nat(kind, PUBLIC, Clock())
    out = nat.outward(packet((INSIDE, 4001), (SERVER, 7700), protocol=protocol))
    (source, port), destination = ends(out)
    assert source == PUBLIC and destination == (SERVER, 7700)
    assert is_valid(out)
    back = nat.inward(packet((SERVER, 7700), (PUBLIC, port), protocol=protocol))
    assert ends(back) == ((SERVER, 7700), (INSIDE, 4001))
    assert is_valid(back)
    assert back[20 + (20 if protocol == TCP else 8) :] == b"hello, there"


@pytest.mark.parametrize(
    ("kind", "other_port", "other_address"),
    [
        ("full-cone", True, True),
        ("restricted", True, False),
        ("port-restricted", False, False),
        ("symmetric", False, False),
    ],
)
def test_each_kind_filters_what_nobody_asked_for(kind, other_port, other_address):
    nat = Nat(kind, PUBLIC, Clock())
    _, port = ends(nat.outward(packet((INSIDE, 4001), (SERVER, 7700))))[0]
    assert passes(nat, (SERVER, 7700), port)
    assert passes(nat, (SERVER, 7701), port) is other_port
    assert passes(nat, (OTHER, 7700), port) is other_address
    assert not passes(nat, (SERVER, 7700), port + 1)
    assert nat.inward(packet((SERVER, 7700), (OTHER, port))) is None


@pytest.mark.parametrize("kind", KINDS)
def test_only_symmetric_routers_give_a_source_several_ports(kind):
    nat = Nat(kind, PUBLIC, Clock())
    peers = [(SERVER, 7700), (SERVER, 7701), (OTHER, 7700)]
    ports = [ends(nat.outward(packet((INSIDE, 4001), peer)))[0][1] for peer in [*peers, *peers]]
    assert ports[:3] == ports[3:]
    assert len(set(ports)) == (3 if kind == "symmetric" else 1)


def test_two_hosts_with_one_port_get_two():
    nat = Nat("port-restricted", PUBLIC, Clock())
    hosts = [(INSIDE, 4001), ("10.0.1.3", 4001)]
    ports = [ends(nat.outward(packet(host, (SERVER, 7700))))[0][1] for host in hosts]
    assert ports[0] == 4001 and ports[1] != 4001
    for host, port in zip(hosts, ports, strict=True):
        assert ends(nat.inward(packet((SERVER, 7700), (PUBLIC, port))))[1] == host


@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_an_idle_flow_is_forgotten(protocol):
    clock = Clock()
    nat = Nat("full-cone", PUBLIC, clock)
    answer = packet((SERVER, 7700), (PUBLIC, 4001), protocol=protocol)
    nat.outward(packet((INSIDE, 4001), (SERVER, 7700), protocol=protocol))
    clock.now = IDLE_S[protocol]
    assert nat.inward(answer) is not None
    clock.now += 1
    assert nat.inward(answer) is None


def test_a_router_that_restarts_forgets_its_flows():
    nat = Nat("full-cone", PUBLIC, Clock())
    nat.outward(packet((INSIDE, 4001), (SERVER, 7700)))
    nat.restart("11.78.0.1")
    assert not passes(nat, (SERVER, 7700), 4001)
    assert ends(nat.outward(packet((INSIDE, 4001), (SERVER, 7700))))[0] == ("11.78.0.1", 4001)


def test_a_host_behind_two_routers_is_seen_at_the_outer_one():
    clock = Clock()
    inner = Nat("port-restricted", "100.64.0.1", clock)
    both = Routers([inner, Nat("symmetric", PUBLIC, clock)])
    out = both.outward(packet((INSIDE, 4001), (SERVER, 7700)))
    source, _ = ends(out)
    assert source[0] == PUBLIC and is_valid(out)
    back = both.inward(packet((SERVER, 7700), source))
    assert ends(back)[1] == (INSIDE, 4001) and is_valid(back)
    assert both.inward(packet((OTHER, 7700), source)) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x60" + bytes(60),
        packet((INSIDE, 1), (SERVER, 2))[:30],
        packet((INSIDE, 1), (SERVER, 2))[:9] + b"\x01" + packet((INSIDE, 1), (SERVER, 2))[10:],
    ],
    ids=["empty", "ipv6", "short", "icmp"],
)
def test_what_is_neither_tcp_nor_udp_is_dropped(data):
    nat = Nat("full-cone", PUBLIC, Clock())
    assert nat.outward(data) is None
    assert nat.inward(data) is None


def test_a_udp_packet_without_a_checksum_stays_without():
    data = bytearray(packet((INSIDE, 4001), (SERVER, 7700), protocol=UDP))
    data[26:28] = b"\0\0"
    out = Nat("full-cone", PUBLIC, Clock()).outward(bytes(data))
    assert out[26:28] == b"\0\0"
