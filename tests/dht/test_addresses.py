"""Addresses: public or private, what is announced of them, and in which order they are dialed."""

import asyncio
import socket

import pytest

from atoll.dht import addresses
from atoll.dht.addresses import announced, by_family, is_public, refused, usable

BOTH = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
HOME = ["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.4/tcp/1", "/ip6/::1/tcp/1", "/ip6/fd00::4/tcp/1"]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("/ip4/203.0.114.1/tcp/1", True),
        ("/ip4/192.168.0.1/tcp/1/p2p/x", False),
        ("/ip4/127.0.0.1/tcp/1", False),
        ("/ip4/169.254.1.1/tcp/1", False),
        ("/ip4/100.64.0.1/tcp/1", False),
        ("/ip6/::1/tcp/1", False),
        ("/ip6/2a00::1/tcp/1", True),
        ("/ip6/fd12::1/tcp/1", False),
        ("/ip6/fe80::1/tcp/1", False),
        ("/ip6zone/eth0/ip6/fe80::1/tcp/1", False),
        ("/ip6/::ffff:10.0.0.1/tcp/1", False),
        ("/dns4/example.org/tcp/1", True),
        ("10.0.0.1", False),
    ],
)
def test_addresses_of_the_internet(address, public):
    assert is_public(address) is public


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (HOME, ["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.4/tcp/1", "/ip6/fd00::4/tcp/1"]),
        # Its router has public IPv6 for every machine; a run at home must stay one.
        ([*HOME[:2], "/ip6/2a00::4/tcp/1"], HOME[:2]),
        (
            [*HOME, "/ip4/203.0.114.9/tcp/1", "/ip6/2a00::4/tcp/1"],
            ["/ip4/203.0.114.9/tcp/1", "/ip6/2a00::4/tcp/1"],
        ),
        ([HOME[0], *HOME[2:], "/ip6/2a00::4/tcp/1"], ["/ip6/2a00::4/tcp/1"]),
        (HOME[2:], HOME[2:]),
        (HOME[:1], HOME[:1]),
        (["/dns4/a.example/tcp/1", HOME[1]], ["/dns4/a.example/tcp/1"]),
    ],
    ids=["home", "home with public IPv6", "public", "IPv6 alone", "private IPv6", "here", "name"],
)
def test_public_and_private_addresses_are_never_announced_together(found, expected):
    assert announced(found) == expected


def test_a_machine_without_ipv6_listens_as_before(monkeypatch):
    monkeypatch.setattr(addresses, "has_ipv6", lambda: False)
    assert usable(BOTH) == BOTH[:1]
    assert usable(BOTH[1:]) == BOTH[1:]  # it was asked for: the error names it
    monkeypatch.setattr(addresses, "has_ipv6", lambda: True)
    assert usable(BOTH) == BOTH


def test_ipv4_is_dialed_first_and_ipv6_is_not_forgotten():
    mixed = ["/ip6/2a00::4/tcp/1", "/ip4/203.0.114.9/tcp/1", "/dns4/a.example/tcp/1"]
    assert by_family(mixed) == [mixed[1:], mixed[:1]]
    assert by_family(mixed[:1]) == [mixed[:1]]
    assert by_family([]) == []


def test_a_machine_refuses_where_nothing_listens():
    async def ask(*names):
        return await refused(names, 5.0)

    with socket.create_server(("127.0.0.1", 0)) as server:
        here = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"
        with socket.socket() as bound:  # holds a port at which it does not listen
            bound.bind(("127.0.0.1", 0))
            dead = f"/ip4/127.0.0.1/tcp/{bound.getsockname()[1]}"
            assert asyncio.run(ask(f"{dead}/p2p/A"))
            assert asyncio.run(ask(dead, "/dns/example.org/tcp/1"))
            assert not asyncio.run(ask(dead, here))
    assert not asyncio.run(ask())
