"""Dials of the transport over libp2p end in time."""

import asyncio

import pytest

from atoll.dht.libp2p import LibP2PTransport
from atoll.dht.p2pd import P2pdError
from atoll.dht.testing.virtualtime import run_virtual
from atoll.dht.transport import TransportError


class Deaf:
    """Stands in for a p2pd whose dials take as long as they may, and fail."""

    peer_id = "a"
    addresses = ()

    def __init__(self):
        self.limits_s = []

    async def connected(self):
        return set()

    async def dial(self, peer, addresses, *, timeout_s):
        self.limits_s.append(timeout_s)
        await asyncio.sleep(min(timeout_s, 1.0))
        raise P2pdError("nobody answers")


def test_each_dial_may_take_what_is_left_of_the_time():
    async def main():
        daemon = Deaf()
        transport = LibP2PTransport(daemon, run_id="run")
        with pytest.raises(TransportError):
            await transport.connect("b", ["/ip4/10.0.0.1/tcp/1"], timeout_s=3.0)
        first, *later = daemon.limits_s
        assert first == pytest.approx(3.0, abs=0.1)
        assert later and max(later) <= 2.0
        await transport.close()

    run_virtual(main())
